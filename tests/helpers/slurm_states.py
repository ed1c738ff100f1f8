"""Job states from Slurm's controller, read independently, to check a run's status against."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.commands import run_command
from hpctrain.files import read_json_lines
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.slurm.states import RunState

#: The expected run state by job state. A run that is complete or was cancelled records it itself.
_MEANING = {
    "PENDING": "PENDING",
    "CONFIGURING": "RUNNING",
    "RUNNING": "RUNNING",
    "COMPLETING": "RUNNING",
    "COMPLETED": "FAILED",
    "CANCELLED": "CANCELLED",
    "FAILED": "FAILED",
    "NODE_FAIL": "FAILED",
    "OUT_OF_MEMORY": "FAILED",
    "TIMEOUT": "FAILED",
}


class JobStates:
    def __init__(self, environ: Mapping[str, str]) -> None:
        fields = "--Format=JobArrayID:60,State:20,RestartCnt:10"
        command = ["squeue", "--noheader", "--all", "--states=all", "--array", fields]
        self._jobs: dict[str, set[tuple[str, str]]] = {}
        for line in run_command(command, environ).stdout.splitlines():
            name, state, restarts = line.split()
            self._jobs.setdefault(name.partition("+")[0], set()).add((state, restarts))

    def of(self, job_id: str) -> set[tuple[str, str]]:
        """Return state and number of restarts of the job, or of its components."""
        array, _, task = job_id.partition("_")
        is_known = any(name.startswith(f"{array}_") for name in self._jobs)
        if task and is_known and job_id not in self._jobs:
            return {("CANCELLED", "0")}  # It was removed from the pending tasks.
        return self._jobs.get(job_id, set())


def check_status(status: RunStatus, before: JobStates, after: JobStates, run: Run) -> bool:
    """Check a status against the controller's states before and after it; return True if that was possible.

    It is impossible while the job is changing, and after the run has recorded its end.
    """
    assert status.job_id is not None
    states = before.of(status.job_id)
    if len(states) != 1 or states != after.of(status.job_id):
        return False
    if any(event["kind"] == "finished" for event in read_json_lines(run.dir.events)):
        return False
    ((state, restarts),) = states
    expected = _MEANING[state]
    if run.dir.cancel_request.exists() and RunState(expected).ended:
        expected = "CANCELLED"
    assert status.state == expected, f"squeue says {state} (restart {restarts}) of {status}"
    return True
