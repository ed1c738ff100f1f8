"""`detect` on the recordings of `scripts/record_launches.py`: it finds the true rank of each process."""

from __future__ import annotations

import json

import pytest
from helpers.launch_runner import RECORDINGS, check_detection, load_recording
from helpers.launches import ALL, SLURM
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster import Ranks, detect
from hpctrain.errors import EnvironmentMismatch

#: Of a newer Slurm, whose batch scripts and interactive shells have negative step ids.
NEWER = "slurm-26.05"


@pytest.mark.parametrize("name", ALL)
def test_ranks_are_those_that_the_launcher_gave(name):
    check_detection(ALL[name], load_recording(name))


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob(f"{NEWER}/*.json")))
def test_ranks_are_those_that_the_launcher_gave_under_slurm_26(name):
    check_detection(ALL[name], load_recording(f"{NEWER}/{name}"))


def test_there_is_a_recording_of_every_launch_and_of_no_other():
    documents = {path: json.loads(path.read_text()) for path in RECORDINGS.rglob("*.json")}
    assert {path.stem for path in RECORDINGS.glob("*.json")} == ALL.keys()
    assert {path.stem for path in RECORDINGS.glob(f"{NEWER}/*.json")} >= {launch.name for launch in SLURM}
    for path, document in documents.items():
        assert document["launch"] == path.stem
        assert document["command"].endswith(ALL[path.stem].command), "record it again"


def answer(variables: dict[str, str]) -> Ranks | None:
    try:
        return detect(variables)
    except EnvironmentMismatch:
        return None


NO_STEPS = [
    "batch-script",
    "array-batch-script",
    "het-batch-script",
    "salloc-shell",
    "salloc-interactive-step",
]


@pytest.mark.parametrize(
    "name", [*NO_STEPS, "ssh-session-with-leftovers", *(f"{NEWER}/{name}" for name in NO_STEPS)]
)
@settings(deadline=None)
@given(data=st.data())
def test_an_ssh_or_ide_session_with_any_part_of_an_allocations_variables_is_alone(name, data):
    (process,) = load_recording(name)
    kept = data.draw(st.sets(st.sampled_from(sorted(process.variables))))
    ranks = answer({variable: process.variables[variable] for variable in kept})
    assert ranks is None or (ranks.environment, ranks.world_size) == ("local", 1)


STEPS = ["srun-uneven", "srun-on-a-part-of-the-nodes", "het-job-unsorted", "array", "srun-pmi2"]


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None)
@given(data=st.data())
def test_a_step_of_which_variables_were_lost_is_recognised_or_refused_but_never_taken_for_another(name, data):
    process = data.draw(st.sampled_from(load_recording(name)))
    lost = data.draw(st.sets(st.sampled_from(sorted(process.variables))))
    ranks = answer({k: v for k, v in process.variables.items() if k not in lost})
    if ranks is None:
        return
    if ranks.environment == "local":
        # Without its rank a process cannot be told from a session; with rank 0 not from a batch script.
        assert "SLURM_PROCID" in lost or process.truth["rank"] == 0
        return
    told = {field: getattr(ranks, field) for field in process.truth if hasattr(ranks, field)}
    assert told == {field: process.truth[field] for field in told}
    assert ranks.master_addr == process.truth["main_host"]
