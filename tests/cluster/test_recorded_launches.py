"""`detect` on the recordings of `scripts/record_launches.py`: it finds each process's true rank."""

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
def test_recorded_ranks_are_detected(name):
    check_detection(ALL[name], load_recording(name))


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob(f"{NEWER}/*.json")))
def test_ranks_recorded_under_slurm_26_are_detected(name):
    check_detection(ALL[name], load_recording(f"{NEWER}/{name}"))


def test_every_launch_has_a_recording():
    documents = {path: json.loads(path.read_text()) for path in RECORDINGS.rglob("*.json")}
    assert {path.stem for path in RECORDINGS.glob("*.json")} == ALL.keys()
    assert {path.stem for path in RECORDINGS.glob(f"{NEWER}/*.json")} >= {launch.name for launch in SLURM}
    for path, document in documents.items():
        assert document["launch"] == path.stem
        assert document["command"].endswith(ALL[path.stem].command), "record it again"


def detect_or_none(variables: dict[str, str]) -> Ranks | None:
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


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*NO_STEPS, "ssh-session-with-leftovers", *(f"{NEWER}/{name}" for name in NO_STEPS)]
)
@settings(deadline=None)
@given(data=st.data())
def test_session_with_some_allocation_variables_is_a_single_process(name, data):
    (process,) = load_recording(name)
    kept = data.draw(st.sets(st.sampled_from(sorted(process.variables))))
    ranks = detect_or_none({variable: process.variables[variable] for variable in kept})
    assert ranks is None or (ranks.environment, ranks.world_size) == ("local", 1)


STEPS = ["srun-uneven", "srun-on-a-part-of-the-nodes", "het-job-unsorted", "array", "srun-pmi2"]


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None)
@given(data=st.data())
def test_step_with_lost_variables_is_detected_or_refused_but_never_wrong(name, data):
    process = data.draw(st.sampled_from(load_recording(name)))
    lost = data.draw(st.sets(st.sampled_from(sorted(process.variables))))
    ranks = detect_or_none({k: v for k, v in process.variables.items() if k not in lost})
    if ranks is None:
        return
    if ranks.environment == "local":
        # Without its rank, a process looks like a session; with rank 0, like a batch script.
        assert "SLURM_PROCID" in lost or process.truth["rank"] == 0
        return
    detected = {field: getattr(ranks, field) for field in process.truth if hasattr(ranks, field)}
    assert detected == {field: process.truth[field] for field in detected}
    assert ranks.master_addr == process.truth["main_host"]
