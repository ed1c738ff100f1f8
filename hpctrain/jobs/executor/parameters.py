"""Parameters of an executor: the options of `hpctrain submit`, and submitit's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import submitit

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option_parser import option_names
from hpctrain.jobs.options.spec_builder import node_shape, validate_option
from hpctrain.jobs.options.table import SubmitOptions
from hpctrain.slurm.duration import format_time_limit
from hpctrain.text import suggest

#: Hints for options that an executor sets itself, and for parameters specific to submitit.
_HINTS = {
    "run_dir": "Each job of an executor has a separate run folder. Pass the parent folder as `folder`.",
    "runs_dir": "Pass the parent folder of the run folders as `folder`.",
    "array": "To submit a job array, use map_array(), submit_array() or batch().",
    "max_pickle_size_gb": "Remove this parameter: hpctrain does not limit the size of the function.",
    (
        "python"
    ): "The ranks use the Python of this program. For another Python, set venv, conda or container_image.",
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


class _PluginParameters(set[str]):
    """All parameters. Iteration omits parameters shared with submitit's Slurm executor.

    `submitit.AutoExecutor` gives a parameter without a prefix to the last plugin that lists it.
    """

    def __iter__(self) -> Iterator[str]:
        shared = submitit.SlurmExecutor._valid_parameters()
        return (name for name in sorted(super().__iter__()) if name not in shared)


def plugin_parameters() -> set[str]:
    """Return the parameters that `submitit.AutoExecutor` accepts with the prefix `hpctrain_`."""
    submitits = {*_HINTS, *_RENAMED, *_CONVERTED, *_WITHOUT_EFFECT}
    return _PluginParameters({*option_names(), *submitits})


def translate_parameter(name: str, value: Any) -> tuple[str, Any]:
    """Return the option's name and value for a parameter of submitit or hpctrain.

    Raises:
        SpecError: there is no such option, or it does not accept this value.
    """
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
    known = ({*option_names()} | _CONVERTED) - _HINTS.keys()
    if plain not in known:
        hint = _HINTS.get(plain) or suggest(plain, sorted(known))
        raise SpecError(f"Executor has no parameter {name!r}. {hint}")
    if value is not None:
        validate_option(plain, value)
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
