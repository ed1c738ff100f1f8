"""Executor that submits functions as jobs."""

from __future__ import annotations

import os
from typing import Any, Unpack, cast

import submitit
from submitit.core.utils import DelayedSubmission

from hpctrain.errors import SpecError, UserError
from hpctrain.jobs.executor.function_runs import submit_calls
from hpctrain.jobs.executor.job import Job
from hpctrain.jobs.options.spec_builder import validate_option
from hpctrain.jobs.options.table import SubmitOptions, all_options, option_aliases
from hpctrain.jobs.runs.run import find_run
from hpctrain.serialization import FunctionCall
from hpctrain.slurm.duration import format_time_limit
from hpctrain.text import suggest

#: Hints for options that an executor sets itself, and for parameters specific to submitit.
_HINTS = {
    "run_dir": "Every job of an executor has a separate run folder. Pass the parent folder as `folder`.",
    "runs_dir": "Use `folder`.",
    "array": "Use map_array(), submit_array() or batch().",
    "num_gpus": "Use gpus_per_node.",
    "gpus_per_task": "Every rank has one GPU. Use gpus_per_node.",
    "cpus_per_gpu": "Use cpus_per_task.",
    "signal_delay_s": "Use stop_before_limit.",
    "additional_parameters": "Use sbatch, such as sbatch={'wckey': 'x'}.",
    "wckey": "Use sbatch={'wckey': …}.",
    "teardown": "Clean up in the function itself: the ranks exit when the function returns.",
    "srun_args": "The supervisor starts the ranks with its own options.",
    "use_srun": "The supervisor starts the ranks.",
    "stderr_to_stdout": "Both streams of a rank are written to one log.",
}
#: Submitit's name for the number of concurrent tasks of an array.
_ARRAY_PARALLELISM = "array_parallelism"


class Executor(submitit.Executor):
    """Executor for functions. Every rank calls the function after the process group is initialized.

    Args:
        folder: parent of the jobs' run folders.
        **options: see `SubmitOptions`; the names are those of the command line.

    Raises:
        SpecError: there is no such option.
    """

    job_class = Job

    def __init__(self, folder: str | os.PathLike[str] = "runs", **options: Unpack[SubmitOptions]) -> None:
        super().__init__(os.fspath(folder))
        self._shown_notes: set[str] = set()
        self.update_parameters(**options)

    @classmethod
    def name(cls) -> str:
        return "hpctrain"

    def job(self, run_id: str) -> Job[Any]:
        """Return the job with that run id or run folder, for programs that did not submit the job.

        Raises:
            RunNotFound: there is no such run.
            UserError: it is a job array.
        """
        run = find_run(run_id, self.folder, os.environ)
        if tasks := run.tasks():
            raise UserError(
                f"{run_id!r} is an array of {len(tasks)} jobs. Choose one job, such as {tasks[0].run_id!r}."
            )
        return Job.from_run(run)

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {*all_options(), _ARRAY_PARALLELISM} - _HINTS.keys()

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set options; None removes an option.

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
        calls = [
            FunctionCall(delayed.function, delayed.args, delayed.kwargs) for delayed in delayed_submissions
        ]
        asked = dict(self.parameters)
        at_once = asked.pop(_ARRAY_PARALLELISM, 0)
        runs, world_size = submit_calls(
            calls,
            cast(SubmitOptions, asked),
            folder=self.folder,
            at_once=at_once,
            environ=dict(os.environ),
            shown_notes=self._shown_notes,
        )
        return [Job(run.dir.path, run.job_id or "", range(world_size)) for run in runs]


def _translated(name: str, value: Any) -> tuple[str, Any]:
    """Convert the name and value of an option; submitit's names are accepted.

    Raises:
        SpecError: there is no such option.
    """
    plain, known = name.removeprefix("slurm_"), Executor._valid_parameters()
    plain = option_aliases().get(plain, plain)
    if plain == "timeout_min":
        return "time", None if value is None else format_time_limit(60 * value)
    if plain == "mem_gb":
        return "mem", None if value is None else f"{round(1024 * value)}M"
    if plain in known:
        if value is not None:
            validate_option(plain, value)
        return plain, value
    hint = _HINTS.get(name.removeprefix("slurm_")) or suggest(plain, sorted(known))
    raise SpecError(f"Executor has no parameter {name!r}. {hint}")
