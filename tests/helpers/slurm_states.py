"""Job states from Slurm's controller, read independently, to check a run's status against."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from helpers.commands import run_command
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
#: The task id of an array's record without remaining tasks.
_NO_TASK = "4294967294"


class JobStates:
    """The states of all jobs at one moment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        output = run_command(["scontrol", "--all", "--oneliner", "show", "job"], environ).stdout
        self._jobs: dict[str, set[tuple[str, str]]] = {}
        self._arrays: set[str] = set()
        for line in output.split("\n"):  # a name may contain other line separators
            fields = dict(re.findall(r"(\w+)=(\S*)", line.partition(" UserId=")[0]))
            state = re.search(r" JobState=(\w+) ", line)
            restarts = re.search(r" Restarts=(\d+) ", line)
            if state is None or restarts is None:
                continue  # "No jobs in the system"
            for name in self._names(fields):
                self._jobs.setdefault(name, set()).add((state[1], restarts[1]))

    def _names(self, fields: Mapping[str, str]) -> Iterable[str]:
        array = fields.get("ArrayJobId")
        if array is None:
            return [fields.get("HetJobId", fields["JobId"])]
        self._arrays.add(array)
        tasks = fields["ArrayTaskId"].partition("%")[0]
        if tasks == _NO_TASK:
            return []
        assert "..." not in tasks, f"scontrol has shortened the list {tasks}"
        names = []
        for part in tasks.split(","):
            first, _, last = part.partition("-")
            last, _, step = last.partition(":")
            names += [f"{array}_{task}" for task in range(int(first), int(last or first) + 1, int(step or 1))]
        return names

    def of(self, job_id: str) -> set[tuple[str, str]]:
        """Return state and number of restarts of the job, or of its components."""
        array, _, task = job_id.partition("_")
        if task and array in self._arrays and job_id not in self._jobs:
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
    if any(event["kind"] == "finished" for event in run.dir.read_events()):
        return False
    ((state, restarts),) = states
    expected = _MEANING[state]
    if run.dir.cancel_request.exists() and RunState(expected).ended:
        expected = "CANCELLED"
    assert status.state == expected, f"scontrol says {state} (restart {restarts}) of {status}"
    return True
