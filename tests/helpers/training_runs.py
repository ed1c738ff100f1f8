"""Submit runs, disturb them, and compare them with undisturbed ones."""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from train_classifier import dataset

from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.fork_server import run_forked
from helpers.processes import assert_no_process_left, run_processes
from helpers.waiting import wait_for
from hpctrain.cluster.processes import ProcessInfo
from hpctrain.files import read_json_lines
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.sandbox import Sandbox

JOB = SCRIPTS / "train_classifier.py"
NUM_EPOCHS, GLOBAL_BATCH_SIZE = 4, 16
NUM_SAMPLES = len(dataset())
STEPS_PER_EPOCH = -(-NUM_SAMPLES // GLOBAL_BATCH_SIZE)
LAST_STEP = NUM_EPOCHS * STEPS_PER_EPOCH
#: On two busy cores, an attempt starts within half a minute; a run has at most three here.
RUN_LIMIT_S = 200.0


def call_hpctrain(args: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
    return run_command([sys.executable, "-m", "hpctrain", *args], env, **options)


@dataclass(frozen=True)
class Run:
    """A run, with the variables that reach its scheduler."""

    path: Path
    env: Mapping[str, str]
    call: Callable[..., Any] = call_hpctrain
    """Calls hpctrain with arguments, variables and options of `run_command`."""

    @property
    def dir(self) -> RunDir:
        return RunDir(self.path)

    def hpctrain(self, *args: str, timeout: float = 60.0, check: bool = True, **options: Any) -> Any:
        return self.call(args, self.env, timeout=timeout, check=check, **options)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.dir.events) if event["kind"] == kind]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, the later one if it was trained twice."""
        records = read_json_lines(self.dir.metrics)
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    def status(self) -> dict[str, Any]:
        return json.loads(self.hpctrain("status", str(self.path), "--json").stdout)

    def wait_for_state(self, state: str) -> None:
        wait_for(lambda: self.status()["state"] == state, 60, f"the state {state}", 0.5)

    def wait_for_step(self, step: int) -> None:
        def is_trained() -> bool:
            newest = next(reversed([*read_json_lines(self.dir.events)]), {"kind": "submitted"})
            is_done = max(self.losses(), default=0) >= step
            assert is_done or newest["kind"] != "finished", f"no step {step}: {self.describe()}"
            return is_done

        wait_for(is_trained, RUN_LIMIT_S, f"step {step} of {self.path}")

    def wait(self, limit_s: float = RUN_LIMIT_S) -> int:
        try:
            result = self.hpctrain("wait", str(self.path), timeout=limit_s, check=False)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None
        return result.returncode

    def describe(self) -> str:
        parts = [f"{event}" for event in read_json_lines(self.dir.events)]
        for log in (self.dir.supervisor_log, self.dir.slurm_log):
            if log.exists():
                parts += [f"== {log.name}", *log.read_text(errors="replace").splitlines()[-30:]]
        if "SLURM_CONF" in self.env:
            for command in (["squeue", "--states=all"], ["squeue", "--steps"], ["sinfo", "--Node", "--long"]):
                result = run_command(command, self.env, check=False)
                parts += [f"== {' '.join(command)}", result.stdout + result.stderr]
        parts += [f"{process.pid} {' '.join(process.argv)[:200]}" for process in run_processes(self.path)]
        return "\n".join(parts)

    def supervisors(self) -> list[ProcessInfo]:
        """Return the batch script's watchdog, if any, and then the supervisors."""
        matching = [process for process in run_processes(self.path) if "hpctrain.supervisor" in process.argv]
        pids = {process.pid for process in matching}
        return sorted(matching, key=lambda process: process.parent in pids)

    def ranks(self) -> dict[int, ProcessInfo]:
        attempt = str(max(self.dir.attempts()))
        ranks = [
            process
            for process in run_processes(self.path)
            if "hpctrain.runtime.worker" in process.argv
            and "srun" not in process.argv[0]
            and process.environ.get("HPCTRAIN_ATTEMPT") == attempt
            and "SLURM_PROCID" in process.environ
            and "SLURM_STEP_ID" in process.environ
        ]
        # Data workers are forks of their rank.
        pids = {process.pid for process in ranks}
        return {int(rank.environ["SLURM_PROCID"]): rank for rank in ranks if rank.parent not in pids}

    def kill_rank(self, rank: int) -> None:
        os.kill(self.ranks()[rank].pid, 9)


def submit(
    path: Path,
    env: Mapping[str, str],
    shape: Sequence[str],
    *,
    options: Sequence[str] = (),
    step_s: float,
    checkpoint_every: int = 6,
    slow_attempts: int = 1,
    further: Sequence[str] = (),
    call: Callable[..., Any] = call_hpctrain,
) -> Run:
    """Submit `train_classifier.py` with `further` arguments. Does not wait."""
    # The same number of threads as in `train_on_forked_ranks`, for the same bits.
    run = Run(path, {"OMP_NUM_THREADS": "1", **env}, call)
    arguments = ["--step-s", str(step_s), "--checkpoint-every", str(checkpoint_every)]
    arguments += ["--slow-attempts", str(slow_attempts), *further]
    run.hpctrain("submit", *shape, *options, "--run-dir", str(path), str(JOB), *arguments)
    return run


def submit_script(
    folder: Path,
    script: Path | str,
    *args: str,
    options: Sequence[str] = ("--backend=local",),
    env: Mapping[str, str] | None = None,
) -> Run:
    """Submit a script, or the source of one, as the run `folder`/run. Does not wait."""
    path = script if isinstance(script, Path) else folder / "train.py"
    if isinstance(script, str):
        folder.mkdir(exist_ok=True)
        path.write_text(script)
    run = Run(folder / "run", env or {})
    run.hpctrain("submit", *options, f"--run-dir={run.path}", str(path), *args, cwd=folder)
    return run


def train_on_forked_ranks(
    path: Path,
    script: Path,
    args: Sequence[str],
    *,
    ranks: int,
    nodes: int = 1,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Train on forked ranks without a supervisor, which takes a tenth of the CPU time of a run."""
    variables = {RUN_DIR_VARIABLE: str(path), ATTEMPT_VARIABLE: "0", "OMP_NUM_THREADS": "1"}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    run_forked(script, args, variables, ranks=ranks, nodes=nodes)
    return Run(path, {})


def preempt(env: Mapping[str, str], *, nodes: int = 4, seconds: int = 2) -> None:
    options = ["--partition=urgent", f"--nodes={nodes}", "--exclusive", "--output=/dev/null"]
    run_command(["sbatch", *options, f"--wrap=sleep {seconds}"], env)


def check_preempted_run_continues(run: Run, cluster: Sandbox) -> None:
    """Preempt a run with a single signal on all nodes, and fail unless it resumes and completes."""
    run.wait_for_step(2)
    preempt(cluster.env, nodes=len(cluster.nodes), seconds=0)
    assert run.wait() == 0
    (stop,), (resumed,) = run.events("signal"), run.events("resumed")
    assert (stop["signal"], stop["saved"], len(run.events("requeue"))) == ("SIGTERM", True, 1)
    assert resumed["step"] == stop["step"] < LAST_STEP
    assert sorted(run.losses()) == list(range(1, LAST_STEP + 1))
    assert_no_process_left(run.path)


def assert_undisturbed(
    run: Run, reference: Run, num_epochs: int = NUM_EPOCHS, *, rounding: bool = False
) -> None:
    """Fail unless the run has ended like the reference: all bits, all samples, and no process left.

    On another number of ranks, losses only agree up to `rounding`.
    """
    expected = reference.losses()
    assert run.losses() == (pytest.approx(expected, rel=1e-4) if rounding else expected)
    assert sorted(run.losses()) == list(range(1, num_epochs * STEPS_PER_EPOCH + 1))
    assert_every_sample_once(run, num_epochs)
    assert_no_process_left(run.path)


def assert_every_sample_once(run: Run, num_epochs: int = NUM_EPOCHS) -> None:
    epochs = {epoch: sorted(indices) for epoch, indices in samples_by_epoch(run).items()}
    assert epochs == {epoch: list(range(NUM_SAMPLES)) for epoch in range(num_epochs)}


def samples_by_epoch(run: Run) -> dict[int, list[int]]:
    """Return each epoch's sample indices; a repeated step counts with its last attempt."""
    records: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path in sorted((run.path / "samples").iterdir()):
        attempt = int(path.name.split("-")[1])
        for record in read_json_lines(path):
            records.setdefault(record["step"], {}).setdefault(attempt, []).append(record)
    epochs: dict[int, list[int]] = {}
    for attempts in records.values():
        for record in attempts[max(attempts)]:
            epochs.setdefault(record["epoch"], []).extend(record["indices"])
    return epochs


def any_rank(world_size: int) -> int:
    return random.SystemRandom().randrange(world_size)
