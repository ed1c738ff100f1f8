"""Programs that fail in each attempt end within their budget, unless they load what they have saved."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.processes import assert_no_process_left
from helpers.run_histories import most_attempts
from helpers.training_runs import Run, submit_script
from helpers.waiting import wait_for

from hpctrain.jobspec.restart_policy import EndKind, RestartPolicy

pytestmark = pytest.mark.timeout(400)

POLICY = RestartPolicy.with_changes({}, 2)
WAYS = (
    *("exception", "exit code", "signal", "kill", "hang", "early exit", "memory", "data worker"),
    "library thread",
)


@dataclass(frozen=True)
class Program:
    """Arguments of `fail_always.py`."""

    way: str
    files: str
    steps: str

    @classmethod
    def draw(cls, seed: int) -> "Program":
        choose = random.Random(seed).choice
        files = choose(("none", "same", "new", "loaded"))
        return cls(choose(WAYS), files, choose(("counted", "uncounted")))

    def submit(self, folder: Path) -> Run:
        folder.mkdir()
        # The exit of the only rank is no failure. A second rank makes attempts longer: it may report errors.
        ranks = 2 if self.files == "none" or self.way == "early exit" else 1
        options = [f"--ntasks-per-node={ranks}", f"--max-failures={POLICY.max_failures}", "--hang-timeout=1"]
        script, shape = SCRIPTS / "fail_always.py", ["--backend=local", "--standby-workers=never"]
        return submit_script(folder, script, self.way, self.files, self.steps, options=[*shape, *options])

    def assert_ends_within_budget(self, run: Run) -> None:
        def end() -> str | None:
            kinds = [EndKind(failure["class"]) for failure in run.events("failure")]
            most = most_attempts(POLICY, kinds, writes_files=self.files != "none")
            assert len(run.events("started")) <= max(most, 1), run.describe()
            return next((event["state"] for event in run.events("finished")), None)

        state = wait_for(end, 120, f"the end of {self}")
        # A local run cannot get more memory.
        progresses = self.files == "loaded" and self.way != "memory"
        assert state == ("COMPLETED" if progresses else "FAILED"), run.describe()
        assert_no_process_left(run.path)


def check(folder: Path, programs: Sequence[Program]) -> None:
    """Run all programs at the same time, because they mostly wait."""
    runs = [program.submit(folder / str(number)) for number, program in enumerate(programs)]
    try:
        for program, run in zip(programs, runs, strict=True):
            program.assert_ends_within_budget(run)
    finally:
        for run in runs:
            run.hpctrain("cancel", str(run.path), check=False)


@pytest.mark.extended
def test_program_that_always_fails_ends(tmp_path):
    check(
        tmp_path,
        [
            Program("signal", "none", "counted"),
            Program("early exit", "none", "uncounted"),
            Program("exception", "same", "uncounted"),
            Program("library thread", "loaded", "uncounted"),
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(0, 36, 4))
def test_random_program_that_always_fails_ends(tmp_path, seed):
    check(tmp_path, [Program.draw(seed + number) for number in range(4)])
