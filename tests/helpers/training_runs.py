"""Submit runs of `train_classifier.py`, disturb them, and compare them with an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from train_classifier import dataset

from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.processes import run_processes
from helpers.waiting import wait_for
from hpctrain.cluster.processes import ProcessInfo
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

JOB = SCRIPTS / "train_classifier.py"
NUM_EPOCHS, GLOBAL_BATCH_SIZE = 4, 16
NUM_SAMPLES = len(dataset())
STEPS_PER_EPOCH = -(-NUM_SAMPLES // GLOBAL_BATCH_SIZE)
LAST_STEP = NUM_EPOCHS * STEPS_PER_EPOCH
#: An attempt on two busy cores starts within half a minute; a run has at most three here.
RUN_LIMIT_S = 200.0


@dataclass(frozen=True)
class Run:
    """A run, with the variables that reach its scheduler."""

    path: Path
    env: Mapping[str, str]

    @property
    def dir(self) -> RunDir:
        return RunDir(self.path)

    def hpctrain(self, *words: str, timeout: float = 60.0, check: bool = True, **options: Any) -> Any:
        command = [sys.executable, "-m", "hpctrain", *words]
        return run_command(command, self.env, timeout=timeout, check=check, **options)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.dir.read_events() if event["kind"] == kind]

    def losses(self) -> dict[int, float]:
        """The loss of each step; of a step trained twice, the later one."""
        return {record["step"]: record["loss"] for record in read_json_lines(self.dir.metrics)}

    def status(self) -> dict[str, Any]:
        return json.loads(self.hpctrain("status", str(self.path), "--json").stdout)

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: max(self.losses(), default=0) >= step, RUN_LIMIT_S, f"step {step} of {self.path}")

    def wait(self) -> int:
        """Wait for the end of the run; returns the exit code."""
        try:
            done = self.hpctrain("wait", str(self.path), timeout=RUN_LIMIT_S, check=False)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        return done.returncode

    def story(self) -> str:
        """What is known of the run, for whoever wants to know why it does not end."""
        parts = [f"{event}" for event in self.dir.read_events()]
        for log in (self.dir.supervisor_log, self.dir.slurm_log):
            if log.exists():
                parts += [f"== {log.name}", *log.read_text(errors="replace").splitlines()[-30:]]
        if "SLURM_CONF" in self.env:
            for command in (["squeue", "--states=all"], ["squeue", "--steps"], ["sinfo", "--Node", "--long"]):
                done = run_command(command, self.env, check=False)
                parts += [f"== {' '.join(command)}", done.stdout + done.stderr]
        parts += [f"{process.pid} {' '.join(process.argv)[:200]}" for process in run_processes(self.path)]
        return "\n".join(parts)

    def ranks(self) -> dict[int, ProcessInfo]:
        """The processes of the ranks that are training now."""
        attempt = str(max(self.dir.attempts()))
        return {
            int(process.environ["SLURM_PROCID"]): process
            for process in run_processes(self.path)
            if "hpctrain.runtime.worker" in process.argv
            and "srun" not in process.argv[0]
            and process.environ.get("HPCTRAIN_ATTEMPT") == attempt
            and "SLURM_PROCID" in process.environ
            and "SLURM_STEP_ID" in process.environ
        }

    def kill_rank(self, rank: int) -> None:
        """Kill -9 of one rank."""
        os.kill(self.ranks()[rank].pid, 9)


def submit(
    path: Path,
    env: Mapping[str, str],
    shape: list[str],
    *,
    options: list[str] | None = None,
    step_s: float,
    checkpoint_every: int = 6,
    slow_attempts: int = 1,
    further: Sequence[str] = (),
) -> Run:
    """Submit `train_classifier.py`, with `further` arguments; does not wait."""
    run = Run(path, env)
    arguments = ["--step-s", str(step_s), "--checkpoint-every", str(checkpoint_every)]
    arguments += ["--slow-attempts", str(slow_attempts), *further]
    run.hpctrain("submit", *shape, *(options or []), "--run-dir", str(path), str(JOB), *arguments)
    return run


def preempt(env: Mapping[str, str], *, nodes: int = 4, seconds: int = 2) -> None:
    """Have an urgent job take so many nodes of the cluster from whoever has them."""
    options = ["--partition=urgent", f"--nodes={nodes}", "--exclusive", "--output=/dev/null"]
    run_command(["sbatch", *options, f"--wrap=sleep {seconds}"], env)


def assert_undisturbed(run: Run, reference: Run, num_epochs: int = NUM_EPOCHS) -> None:
    """Losses are bitwise the reference's, and every sample was trained exactly once an epoch."""
    assert run.dir.metrics.exists()
    assert run.losses() == reference.losses()
    assert sorted(run.losses()) == list(range(1, num_epochs * STEPS_PER_EPOCH + 1))
    assert_every_sample_once(run, num_epochs)


def assert_same_training(run: Run, reference: Run) -> None:
    """Losses agree up to rounding, and every sample was trained exactly once an epoch."""
    assert sorted(run.losses()) == list(range(1, LAST_STEP + 1))
    assert run.losses() == pytest.approx(reference.losses(), rel=1e-4)
    for indices in samples_by_epoch(run).values():
        assert sorted(indices) == list(range(NUM_SAMPLES))


def assert_every_sample_once(run: Run, num_epochs: int = NUM_EPOCHS) -> None:
    """Every sample was trained exactly once an epoch."""
    for epoch, indices in samples_by_epoch(run).items():
        counts = Counter(indices)
        assert len(counts) == NUM_SAMPLES, (
            f"epoch {epoch}: {NUM_SAMPLES - len(counts)} samples were never trained"
        )
        assert set(counts.values()) == {1}, f"epoch {epoch}: samples were trained twice"
    assert sorted(samples_by_epoch(run)) == list(range(num_epochs))


def samples_by_epoch(run: Run) -> dict[int, list[int]]:
    """Indices of each epoch that made the result: of a step trained again, those of its last attempt."""
    by_step: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for attempt, record in _sample_records(run):
        by_step.setdefault(record["step"], {}).setdefault(attempt, []).append(record)
    epochs: dict[int, list[int]] = {}
    for attempts in by_step.values():
        for record in attempts[max(attempts)]:
            epochs.setdefault(record["epoch"], []).extend(record["indices"])
    return epochs


def _sample_records(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    for path in sorted((run.path / "samples").iterdir()):
        attempt = int(path.name.split("-")[1])
        for record in read_json_lines(path):
            yield attempt, record


WORDS = [
    *(":", "--", "--nodes=3", "-J", "", " ", "two  words", "'", '"', "\\", "%j %%", "é ü 漢 🏖", "{{ x }}"),
    *("$(touch executed)", "`touch executed`", "; touch executed", "&& touch executed"),
    *("a\nb", "\n#SBATCH --job-name=executed\n"),
]

DUMP = """
import json, os, sys
from pathlib import Path
record = [sys.argv[1:], {name: value for name, value in os.environ.items() if name.startswith("WORD_")}]
Path(os.environ["HPCTRAIN_RUN_DIR"], f"dump-{os.environ['RANK']}.json").write_text(json.dumps(record))
"""


def check_words(shape: list[str], env: Mapping[str, str], tmp_path: Path) -> None:
    """Pass hostile words in every place that takes any, and compare what the ranks got."""
    folder = tmp_path / "a 'b' \"c\" $(touch executed) ; #SBATCH %j"
    folder.mkdir()
    script = folder / "train '$(touch executed)';\n.py"
    script.write_text(DUMP)
    run = Run(folder / "run", env)
    variables = {f"WORD_{i}": word for i, word in enumerate(WORDS)}
    options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    done = run_command(
        [sys.executable, "-m", "hpctrain", "submit", *shape, *options, "--run-dir", run.path, script, *WORDS],
        env,
        cwd=folder,
    )
    assert done.returncode == 0
    assert run.wait() == 0
    for rank in range(2):
        assert json.loads((run.path / f"dump-{rank}.json").read_text()) == [WORDS, variables]
    assert list(tmp_path.rglob("executed*")) == []


def any_rank(world_size: int) -> int:
    return random.SystemRandom().randrange(world_size)
