"""Executor that submits functions as jobs."""

from __future__ import annotations

import os
from typing import Any, Literal, Unpack

import submitit
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.debug import DebugJob

from hpctrain.errors import UserError
from hpctrain.jobs.executor.function_runs import submit_calls
from hpctrain.jobs.executor.job import Job
from hpctrain.jobs.executor.parameters import plugin_parameters, to_options, translate_parameter
from hpctrain.jobs.options.table import SubmitOptions
from hpctrain.jobs.runs.run import find_run
from hpctrain.serialization import FunctionCall


class Executor(submitit.Executor):
    """Executor for functions. Every rank calls the function after the process group is initialized.

    `submit` returns a `Job`. On several ranks, use its `results()`: `result()` requires a single rank.
    This class is also the `hpctrain` plugin of `submitit.AutoExecutor`.

    Args:
        folder: parent of the jobs' run folders.
        cluster: submitit's name for `backend`. "debug" calls the function in this process.
        **options: see `SubmitOptions`; the names are those of the command-line options, with underscores.

    Raises:
        SpecError: there is no such option.
    """

    job_class = Job

    def __init__(
        self,
        folder: str | os.PathLike[str] = "runs",
        *,
        cluster: Literal["auto", "slurm", "local", "debug"] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> None:
        # submitit replaces %j with the job id. In hpctrain, every job has a separate subfolder.
        super().__init__(JobPaths.get_first_id_independent_folder(os.fspath(folder)))
        self._shown_notes: set[str] = set()
        self.update_parameters(**options)
        if cluster is not None:
            self.update_parameters(backend=cluster)

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
    def affinity(cls) -> int:
        return 0  # AutoExecutor uses this executor only on request.

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return plugin_parameters()

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set options; None removes an option.

        Raises:
            SpecError: there is no such option.
        """
        for name, value in kwargs.items():
            known, meant = translate_parameter(name, value)
            if meant is None:
                self.parameters.pop(known, None)
            else:
                self.parameters[known] = meant

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        if self.parameters.get("backend") == "debug":
            return [DebugJob(self.folder, delayed) for delayed in delayed_submissions]
        calls = [
            FunctionCall(delayed.function, delayed.args, delayed.kwargs) for delayed in delayed_submissions
        ]
        options, at_once = to_options(self.parameters)
        runs, world_size = submit_calls(
            calls,
            options,
            folder=self.folder,
            at_once=at_once,
            environ=dict(os.environ),
            shown_notes=self._shown_notes,
        )
        return [Job(run.dir.path, run.job_id or "", range(world_size)) for run in runs]
