"""The ranks of a run that is running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.errors import SpecError
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.slurm.states import RunState
from hpctrain.text import format_ranks, pluralize


def require_running(
    run: Run, ranks: Sequence[int], *, option: str, done: str
) -> tuple[RunStatus, dict[str, Any]]:
    """Return the status of a run and the newest start of its ranks.

    Args:
        run: the run.
        ranks: ranks that the run must have.
        option: the option with the ranks.
        done: past participle of the intended action.

    Raises:
        SpecError: the run is not running, or has no such rank.
    """
    if tasks := run.tasks():
        raise SpecError(f"Run {run.run_id} is a job array. Specify a task, such as {tasks[0].run_id}.")
    status = run.status()
    started = [event for event in run.dir.read_events() if event["kind"] == "started"]
    if status.state is RunState.RUNNING and not started:
        raise SpecError(
            f"The ranks of run {run.run_id} have not started yet, so they cannot be {done}. Try again in a "
            "few seconds."
        )
    if status.state is not RunState.RUNNING:
        raise SpecError(f"Run {run.run_id} is {status.state}. Only a run that is RUNNING can be {done}.")
    world_size = int(started[-1]["world_size"])
    if missing := [rank for rank in ranks if rank >= world_size]:
        raise SpecError(
            f"Run {run.run_id} has no {format_ranks(missing)} ({option}). It has "
            f"{pluralize(world_size, 'rank')}, numbered from 0."
        )
    return status, started[-1]
