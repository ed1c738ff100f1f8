"""The checkpoints of a training after a power loss at any moment, in every state of the disk."""

import json
import sys
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from helpers import SCRIPTS
from helpers.commands import environment
from helpers.fork_server import free_port, run_script, torchrun_variables
from helpers.saved_states import equal
from power_loss import Call, Disk, Tree, crash_states, record, write_tree

from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.checkpoint.store import CheckpointStore, LoadedCheckpoint
from hpctrain.cli.main import cli
from hpctrain.files import read_json_lines
from hpctrain.jobs.submit.submit_prepared import _write
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir

SCRIPT = SCRIPTS / "train_small.py"
#: The last save deletes the first checkpoint.
LAST_STEP = 4
COMMANDS = (["status", "--json"], ["resume", "--dry-run"], ["report", "--json"], ["checkpoints", "--verify"])


@dataclass
class Training:
    """A recorded training that saves after each step."""

    folder: Path
    run: RunDir
    tier: Path | None
    calls: list[Call]
    before: Disk
    """The folder before the training."""

    def load(self) -> LoadedCheckpoint | None:
        """Load the newest checkpoint with the product's code, on one rank."""
        store = CheckpointStore(self.run.checkpoints, second_tier=self.tier)
        try:
            return store.load_newest()[0]
        finally:
            store.close()

    def states_by_step(self) -> dict[int, object]:
        """Return the state after each step, as loaded without a crash."""
        disk, states = deepcopy(self.before), {}
        for call in self.calls:
            disk.replay(call)
            if call[0] == "rename" and b"/.saving-" in call[1][0]:
                write_tree(disk.newest(), self.folder)
                loaded = self.load()
                assert loaded is not None
                states[loaded.step] = loaded.state
        assert states.keys() == set(range(1, LAST_STEP + 1))
        return states


@pytest.fixture
def train(disk_folder, tmp_path):
    """A function that records a training."""

    def train(ranks: int, *, with_tier: bool) -> Training:
        run, tier = RunDir(disk_folder / "runs" / "run"), disk_folder / "tier" if with_tier else None
        if tier is not None:
            tier.mkdir()
        before, port = Disk(disk_folder), free_port()
        spec = JobSpec(
            script=str(SCRIPT),
            name="x",
            run_id=run.run_id,
            run_dir=str(run),
            backend="local",
            python=sys.executable,
            workdir=str(tmp_path),
        )
        calls = record(disk_folder, [(submit, (spec,))])
        env = {"HPCTRAIN_RUN_DIR": str(run), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        args = [str(LAST_STEP), "checkpoint_every=1", "validate_every=null", "norm=false"]
        args += [f'local_checkpoints="{tier}"'] if tier else []
        processes = []
        for rank in range(ranks):
            variables = environment(env) | torchrun_variables(rank, ranks, 1, port)
            arguments = SCRIPT, args, variables, tmp_path / f"output-{rank}"
            processes.append((run_script, arguments))
        calls += record(disk_folder, processes)
        return Training(disk_folder, run, tier, calls, before)

    return train


def submit(spec: JobSpec) -> None:
    """Write the folder of a run like `hpctrain submit`."""
    _write(spec, "#!/bin/bash\n", None)
    RunDir(Path(spec.run_dir)).log_event("submitted", 0, job_id="1", backend="local")


def last_reported(tree: Tree) -> int:
    """Return the last step that the run has reported as saved to the run folder."""
    events = map(json.loads, (tree.get("runs/run/events.jsonl") or b"").splitlines())
    saved = (event for event in events if event["kind"] == "checkpoint" and event["tier"] == "shared")
    return max((event["step"] for event in saved), default=0)


def check_states(training: Training, seed: int, per_call: int, *, commands_every: int) -> int:
    """Load each state, and run the commands on some of them; return the number of states."""
    expected, count, begun = training.states_by_step(), 0, time.monotonic()
    states = crash_states(training.before, training.calls, Random(seed), at_most=0, drawn=per_call)
    for count, (tree, newest) in enumerate(states, 1):
        reported = last_reported(newest)
        state = f"state {count} of seed {seed}, after the report of step {reported}"
        write_tree(tree, training.folder)
        if count % commands_every == 0 and training.run.job_script.exists():
            check_commands(training.run, state)
        loaded = training.load()
        step = 0 if loaded is None else loaded.step
        assert step >= reported, f"{state}: step {step} was loaded"
        assert loaded is None or equal(loaded.state, expected[step]), f"{state}: step {step} is wrong"
        if loaded is not None and loaded.path.parent == training.run.checkpoints:
            recorded = {record["step"] for record in read_json_lines(training.run.metrics)}
            assert recorded >= set(range(1, step + 1)), f"{state}: only metrics of {recorded} for {step}"
        listed, _ = list_checkpoints(training.run, verify=True)
        marked = [one.step for one in listed if one.newest]
        assert marked == ([step] if step else []), f"{state}: {marked} is listed, but {step} was loaded"
    print(f"{count} states of {len(training.calls)} calls in {time.monotonic() - begun:.0f} s")
    return count


def check_commands(run: RunDir, state: str) -> None:
    for name, *options in COMMANDS:
        argv = [name, str(run), *options]
        result = CliRunner(env=environment({"PATH": "/nonexistent"})).invoke(cli, argv)
        is_own = result.exception is None or isinstance(result.exception, SystemExit)
        assert is_own, f"{state}: {argv}: {result.exception!r}"
        assert result.exit_code in (0, 1 if name == "checkpoints" else 0), f"{state}: {argv}: {result.output}"


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.slow
def test_states_of_two_ranks(train):
    training = train(2, with_tier=False)
    assert check_states(training, 0, 1, commands_every=100) > 100
    for synced in ("files", "folders"):
        calls = [
            call for call in training.calls if call[0] != "fsync" or is_file(call) != (synced == "files")
        ]
        with pytest.raises(AssertionError, match="of seed 0"):
            check_states(replace(training, calls=calls), 0, 1, commands_every=10**6)


def is_file(call: Call) -> bool:
    return b"." in call[1][0].rpartition(b"/")[2].replace(b".saving", b"")


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("with_tier", [False, True], ids=["shared", "tier"])
def test_many_states(train, ranks, with_tier, seed):
    """More than 50,000 states in the twelve trainings."""
    drawn, at_least = (20, 3500) if with_tier else (40, 5000)
    assert check_states(train(ranks, with_tier=with_tier), seed, drawn, commands_every=200) > at_least
