"""Submits functions as jobs."""

from __future__ import annotations

import os
from typing import Any, Unpack, cast

import submitit
from submitit.core.utils import DelayedSubmission

from hpctrain.errors import SpecError, UserError
from hpctrain.jobs.build import check_value
from hpctrain.jobs.duration import format_duration
from hpctrain.jobs.executor.job import Job
from hpctrain.jobs.functions import submit_calls
from hpctrain.jobs.given import nearest
from hpctrain.jobs.options import SubmitOptions, options
from hpctrain.jobs.runs import find_run
from hpctrain.pickles import Call

#: Options of a submission that an executor sets itself, and what to use in their place.
_OURS = {
    "run_dir": "Every job of an executor has a run folder of its own; give their parent as `folder`.",
    "array": "Use map_array(), submit_array() or batch().",
}
#: How many tasks of an array may run at once, as submitit calls it.
_AT_ONCE = "array_parallelism"


class Executor(submitit.Executor):
    """Submits functions. Every rank calls the function, with the process group ready.

    Args:
        folder: where the jobs' run folders are made.
        **options: see `SubmitOptions`; they are named as on the command line.

    Raises:
        SpecError: there is no such option.
    """

    job_class = Job

    def __init__(self, folder: str | os.PathLike[str] = "runs", **options: Unpack[SubmitOptions]) -> None:
        super().__init__(os.fspath(folder))
        self._told: set[str] = set()
        self.update_parameters(**options)

    @classmethod
    def name(cls) -> str:
        return "hpctrain"

    def job(self, run_id: str) -> Job[Any]:
        """The job of that run id, or of that run folder: for a program that did not submit it itself.

        Raises:
            RunNotFound: there is none.
            UserError: it is a job array.
        """
        run = find_run(run_id, self.folder, os.environ)
        if tasks := run.tasks():
            raise UserError(
                f"{run_id!r} is an array of {len(tasks)} jobs. Take one, such as {tasks[0].run_id!r}."
            )
        return Job.of(run)

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {*options(), _AT_ONCE} - _OURS.keys()

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set options; None takes one back.

        Raises:
            SpecError: there is no such option.
        """
        for name, value in kwargs.items():
            known, meant = _translated(name, value)
            if meant is None:
                self.parameters.pop(known, None)
            else:
                self.parameters[known] = meant

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        calls = [Call(delayed.function, delayed.args, delayed.kwargs) for delayed in delayed_submissions]
        asked = dict(self.parameters)
        at_once = asked.pop(_AT_ONCE, 0)
        runs, world_size = submit_calls(
            calls,
            cast(SubmitOptions, asked),
            folder=self.folder,
            at_once=at_once,
            environ=dict(os.environ),
            told=self._told,
        )
        return [Job(run.dir.path, run.job_id or "", range(world_size)) for run in runs]


def _translated(name: str, value: Any) -> tuple[str, Any]:
    """An option and its value, out of what submitit or we call it.

    Raises:
        SpecError: there is no such option.
    """
    plain, known = name.removeprefix("slurm_"), Executor._valid_parameters()
    if plain == "timeout_min":
        return "time", None if value is None else format_duration(60 * value)
    if plain == "mem_gb":
        return "mem", None if value is None else f"{round(1024 * value)}M"
    if plain in known:
        if value is not None:
            check_value(plain, value)
        return plain, value
    hint = _OURS.get(plain) or nearest(plain, sorted(known))
    raise SpecError(f"Executor has no parameter {name!r}. {hint}")
