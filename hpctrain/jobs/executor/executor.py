"""Submit functions as jobs: runs whose ranks call a function."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import submitit
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.debug import DebugJob

from hpctrain.errors import SpecError
from hpctrain.jobs.executor.job import Job
from hpctrain.jobs.options.option_parser import option_names
from hpctrain.jobs.options.option_table import SubmitOptions
from hpctrain.jobs.options.spec_builder import new_run_id, node_shape
from hpctrain.jobs.runs.run import find_run, require_single
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.records.call_payload import CallPayload, FunctionCall
from hpctrain.slurm.parsing import format_time_limit
from hpctrain.text import suggest

log = logging.getLogger("hpctrain")

#: Script of every rank. It is started by its path, not imported here, because it needs torch.
_SCRIPT = Path(__file__).resolve().parents[2] / "runtime" / "function_worker.py"

#: Hints for options that an executor sets itself, and for parameters specific to submitit.
_HINTS = {
    "run_dir": "Each job of an executor has a separate run folder. Pass the parent folder as `folder`.",
    "runs_dir": "Pass the parent folder of the run folders as `folder`.",
    "array": "To submit a job array, use map_array(), submit_array() or batch().",
    "max_pickle_size_gb": "Remove this parameter: hpctrain does not limit the size of the function.",
    "python": "The ranks use this program's Python. For another Python, set venv, conda or container_image.",
    "use_srun": "The supervisor starts the ranks with srun. To use torchrun, set launcher to torchrun.",
    "visible_gpus": "Set CUDA_VISIBLE_DEVICES in the environment of the program that submits the jobs.",
}
#: submitit's names of options.
_RENAMED = {
    "job_name": "name",
    "num_gpus": "gpus_per_node",
    "signal_delay_s": "stop_before_limit",
    "srun_args": "srun_arg",
    "tasks_per_node": "ntasks_per_node",
}
#: submitit's parameters that `to_options` converts, because they are a part of an option.
_CONVERTED = {"additional_parameters", "array_parallelism", "cpus_per_gpu", "max_num_timeout"}
#: submitit's parameters that request the default behavior.
_WITHOUT_EFFECT = {"stderr_to_stdout", "use_srun"}


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
            SpecError: it is a job array.
        """
        run = find_run(run_id, self.folder, os.environ)
        require_single(run)
        return Job(run.dir.path, run.job_id or "", range(load_spec(run.dir.spec).world_size))

    @classmethod
    def affinity(cls) -> int:
        return 0  # AutoExecutor uses this executor only on request.

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        submitits = {*_HINTS, *_RENAMED, *_CONVERTED, *_WITHOUT_EFFECT}
        return _PluginParameters({*option_names(), *submitits})

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            option, parsed = translate_parameter(name, value)
            if parsed is None:
                self.parameters.pop(option, None)
            else:
                self.parameters[option] = parsed

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        if self.parameters.get("backend") == "debug":
            return [DebugJob(self.folder, delayed) for delayed in delayed_submissions]
        calls = [FunctionCall(call.function, call.args, call.kwargs) for call in delayed_submissions]
        options, max_concurrent = to_options(self.parameters)
        # A function that raised an exception is called again only on request.
        again = "max_failures" in options or any(
            kind.startswith("python") for kind in options.get("restart_policy", ())
        )
        payloads = [CallPayload.serialize(call, retry_on_exception=again).to_bytes() for call in calls]
        names = {call.name for call in calls}
        name = options.get("name") or (names.pop() if len(names) == 1 else "functions")
        limit = f"%{max_concurrent}" if max_concurrent else ""
        array = f"0-{len(calls) - 1}{limit}" if len(calls) > 1 else ""
        run_dir = self.folder / new_run_id(name)
        while run_dir.exists():
            run_dir = self.folder / new_run_id(name)
        submission = prepare_submission(
            _SCRIPT,
            [],
            cast(SubmitOptions, {**options, "name": name, "run_dir": run_dir}),
            # Overrides configuration files: the number of tasks is the number of calls.
            assignments=[f"array={array}"],
            environ=dict(os.environ),
            cwd=Path.cwd(),
            python=sys.executable,
            code=_program_folder(),
        )
        if not (spec := submission.spec).supervised:
            raise SpecError(
                "Functions run in hpctrain's ranks, which the template 'plain' leaves out (template). Choose "
                "another template."
            )
        if spec.is_elastic:
            raise SpecError(
                f"{spec.min_nodes} to {spec.nodes} nodes were requested (--nodes), but a function returns "
                "one result per rank, so the number of nodes must be fixed. Request a single number, "
                "such as 4."
            )
        advice = f"--array {array.partition('%')[0]}%2"
        for note in submission.notes:
            if note not in self._shown_notes:
                self._shown_notes.add(note)
                log.warning(note.replace(advice, "slurm_array_parallelism=2"))
        run, job_id = submit_prepared(submission, payloads)
        for prospect in submission.forecast:
            log.info(prospect)
        jobs = {run.dir.task(index): f"{job_id}_{index}" for index in run.dir.tasks()} or {run.dir: job_id}
        return [Job(folder.path, job, range(spec.world_size)) for folder, job in jobs.items()]


class _PluginParameters(set[str]):
    """All parameters. Iteration omits parameters shared with submitit's Slurm executor."""

    def __iter__(self) -> Iterator[str]:
        shared = submitit.SlurmExecutor._valid_parameters()
        return (name for name in sorted(super().__iter__()) if name not in shared)


def translate_parameter(name: str, value: Any) -> tuple[str, Any]:
    """Return the option's name and value for a parameter of submitit or hpctrain."""
    plain = name.removeprefix("slurm_")
    plain = _RENAMED.get(plain, plain)
    match plain, value:
        case "timeout_min", _:
            return "time", None if value is None else format_time_limit(60 * value)
        case "mem_gb", _:
            return "mem", None if value is None else f"{round(1024 * value)}M"
        case "backend", "debug":
            return plain, value
        case ("stderr_to_stdout", _) | ("use_srun", True | None):
            return plain, None
    accepted = ({*option_names()} | _CONVERTED) - _HINTS.keys()
    if plain not in accepted:
        hint = _HINTS.get(plain) or suggest(plain, sorted(accepted))
        raise SpecError(f"Executor has no parameter {name!r}. {hint}")
    return plain, value


def to_options(parameters: Mapping[str, Any]) -> tuple[SubmitOptions, int]:
    """Return the options of a submission, and the number of concurrent tasks of an array; 0 if not set."""
    options = {name: value for name, value in parameters.items() if name not in _CONVERTED}
    for key, value in parameters.get("additional_parameters", {}).items():
        name = key.replace("-", "_")
        if _RENAMED.get(name, name) in option_names():
            options.update([translate_parameter(name, value)])
        else:
            text = "" if value is True else str(value)
            options["sbatch"] = {**options.get("sbatch", {}), name.replace("_", "-"): text}
    if (cpus := parameters.get("cpus_per_gpu")) is not None:
        _, gpus, ntasks = node_shape(cast(SubmitOptions, options))
        options["cpus_per_task"] = cpus * max(1, gpus // (ntasks or gpus or 1))
    if (retries := parameters.get("max_num_timeout")) is not None:
        options["restart_policy"] = {"time-limit.retries": retries, **options.get("restart_policy", {})}
    return cast(SubmitOptions, options), parameters.get("array_parallelism", 0)


def _program_folder() -> Path:
    """Return the folder of this program's modules; the current folder for tools such as notebooks."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(os.path.realpath(program)).parent if program else None
    tools = [Path(os.path.realpath(prefix)) for prefix in (sys.prefix, sys.base_prefix)]
    if folder is None or any(folder.is_relative_to(prefix) for prefix in tools):
        return Path.cwd()
    return folder
