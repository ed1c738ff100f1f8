"""Build the `JobSpec` of a job from its completed options."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option_table import SubmitOptions, is_template_path
from hpctrain.jobspec.container import (
    DEFAULT_PYTHON,
    Container,
    ContainerRuntime,
    is_image_file,
    split_list_values,
)
from hpctrain.jobspec.job_spec import CONTROL_CHARACTER, BackendName, CodeRef, JobSpec
from hpctrain.jobspec.launcher import ProgramKind, TorchrunConfig
from hpctrain.jobspec.notify import DEFAULT_STALL_S, NOTIFICATION_KINDS, NotifyConfig
from hpctrain.jobspec.restart_policy import parse_rule_changes
from hpctrain.jobspec.shell_setup import ShellSetup, is_conda_prefix
from hpctrain.rundir import ARCHIVE_SUFFIX, RunDir
from hpctrain.slurm.parsing import parse_duration
from hpctrain.text import is_count, pluralize

#: Default parent of run folders, relative to the folder of the submission.
RUNS_FOLDER = "runs"

#: Options of sbatch that name a file.
_PATH_DIRECTIVES = {"bbf", "container"}
#: Options of sbatch that list nodes, or name a file with a list if the value contains a slash.
_NODE_DIRECTIVES = {"nodelist", "exclude"}
#: Options whose values are fields of `JobSpec`, by the name of the field.
SPEC_FIELDS = {
    **{
        name: name
        for name in (
            *("spare_nodes", "node_check", "gpu_request_style", "cpus_per_task", "max_failures", "mpi"),
            *("cpu_binding", "independent_ranks", "resume_mode", "stage_environment"),
        )
    },
    "scale_up_after_s": "scale_up_after",
    "stop_before_limit_s": "stop_before_limit",
    "standby_workers_s": "standby_workers",
    "hang_timeout_s": "hang_timeout",
}
#: Minimum values of options for which 0 has another meaning in `JobSpec`, or is not possible.
_LEAST = {"stop_before_limit": 1, "hang_timeout": 1, "standby_workers": 0}

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)
_MAX_NAME_IN_ID = 40
_EXTENDS = re.compile(r"""\{%-?\s*extends\s+["']([^"']+)["']""")


def build_spec(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    *,
    backend: BackendName,
    cwd: Path,
    python: str,
    program: ProgramKind = "script",
    code: Callable[[RunDir], CodeRef] | None = None,
    expedites_requeues: bool = False,
) -> JobSpec:
    """Fill in the defaults, and run the checks that do not inspect the machine; `code` chooses the copy."""
    path = os.path.normpath(cwd / script) if program in ("script", "batch") else os.fspath(script)
    name = options.get("name", CONTROL_CHARACTER.sub("-", _default_name(program, path, args)))
    gpu_type, gpus_per_node, ntasks_per_node = node_shape(options)
    time_limit_s = None if (limit := options.get("time")) is None else parse_duration(str(limit))
    directives = _directives(options, cwd)
    if limit is not None and time_limit_s is None and backend == "slurm":
        # Without the option, the default of the partition would apply.
        directives["time"] = "UNLIMITED"
    min_nodes, nodes = _nodes(options.get("nodes", 1))
    shell = _shell(options, cwd)
    run_dir = _run_dir(options, name, cwd)
    template = template_path(options, cwd)
    fields = {
        field: _checked(option, cast(dict[str, Any], options)[option])
        for field, option in SPEC_FIELDS.items()
        if option in options
    }
    return JobSpec(
        script=path,
        program=program,
        args=tuple(map(str, args)),
        env=dict(options.get("env", {})),
        name=name,
        run_id=run_dir.name,
        run_dir=str(run_dir),
        backend=backend,
        array=None if (array := options.get("array")) is None else str(array),
        nodes=nodes,
        min_nodes=min_nodes,
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        ntasks_per_node=ntasks_per_node,
        python=shell.python or python,
        workdir=str(cwd),
        time_limit_s=time_limit_s,
        restart_policy=parse_rule_changes(cast(Mapping[str, str], options.get("restart_policy", {}))),
        srun_args=tuple(options.get("srun_arg", ())),
        checkpoints=None if (glob := options.get("checkpoints")) is None else os.path.join(cwd, glob),
        directives=directives,
        template=template,
        supervised=not is_plain_template(template),
        expedite_requeue=expedites_requeues,
        shell=shell,
        torchrun=_torchrun(options),
        code=None if code is None else code(RunDir(run_dir)),
        container=_container(options, backend, cwd),
        stage=_stage(options, cwd),
        notify=NotifyConfig(
            targets=tuple(options.get("notify", ())),
            on=cast(Any, split_list_values(options.get("notify_on", NOTIFICATION_KINDS))),
            stall_s=options.get("notify_stall_after", DEFAULT_STALL_S),
        ),
        **fields,
    )


def _default_name(program: ProgramKind, path: str, args: Sequence[str]) -> str:
    """Return the name of the program, such as `train` for `python -m pkg.train`."""
    if program == "batch":
        return Path(path).name
    if program == "module":
        return path.rpartition(".")[2]
    if program == "command" and Path(path).name.startswith("python"):
        programs = [arg for arg in map(str, args) if not arg.startswith("-")]
        if programs:
            return _default_name("module" if "-m" in args else "script", programs[0], [])
    return Path(path).stem


def _checked(option: str, value: Any) -> Any:
    if value == "never" and option in _LEAST:
        return None
    if option in _LEAST and value < _LEAST[option]:
        flag = option.replace("_", "-")
        never = "" if option == "stop_before_limit" else f" To disable it, use `--{flag} never`."
        raise SpecError(f"--{flag} is {value} s, but must be at least {_LEAST[option]} s.{never}")
    return value


def _run_dir(options: SubmitOptions, name: str, cwd: Path) -> Path:
    if (run_dir := options.get("run_dir")) is not None:
        path = Path(os.path.normpath(cwd / run_dir))
        if not path.name:
            raise SpecError(
                f"--run-dir is {os.fspath(run_dir)!r}, which has no folder name to use as the run id. Choose "
                "a subfolder."
            )
        return path
    return Path(os.path.normpath(cwd / options.get("runs_dir", RUNS_FOLDER))) / new_run_id(name)


def new_run_id(name: str) -> str:
    stem = _NOT_IN_ID.sub("-", name)[:_MAX_NAME_IN_ID].strip("-.") or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _nodes(value: int | str) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if match := re.fullmatch(r"([1-9]\d{0,17}):(\d{1,18})", value, re.ASCII):
        return int(match[1]), int(match[2])
    raise SpecError(
        f"--nodes {value!r} is neither a number nor a range. Use a number of nodes, such as 2, or a minimum "
        "and maximum, such as 2:4."
    )


def node_shape(options: SubmitOptions) -> tuple[str | None, int, int]:
    """Return the type and number of GPUs of a node, and the number of its ranks; 0 for the default number."""
    gpu_type, gpus = parse_gpus(options.get("gpus_per_node", 0))
    ntasks, per_task = options.get("ntasks_per_node", 0), options.get("gpus_per_task", 0)
    for option, value in (("ntasks_per_node", ntasks), ("gpus_per_task", per_task)):
        if option in options and value < 1:
            raise SpecError(f"--{option.replace('_', '-')} is {value}, but must be at least 1.")
    if not per_task:
        return gpu_type, gpus, ntasks
    gpus = gpus or per_task * (ntasks or 1)
    ntasks = ntasks or gpus // per_task
    if ntasks * per_task != gpus:
        raise SpecError(
            f"{pluralize(ntasks, 'rank')} (--ntasks-per-node) with {per_task} GPUs each (--gpus-per-task) "
            f"need {ntasks * per_task} GPUs per node, but --gpus-per-node is {gpus}. Change one of them."
        )
    return gpu_type, gpus, ntasks


def parse_gpus(value: int | str) -> tuple[str | None, int]:
    if isinstance(value, int):
        return None, value
    gpu_type, _, number = value.rpartition(":")
    if not gpu_type or not is_count(number):
        raise SpecError(
            f"--gpus-per-node is {value!r}, but must be a number, such as 8, or a type and a number, "
            "such as h100:8."
        )
    return gpu_type, int(number)


def _directives(options: SubmitOptions, cwd: Path) -> dict[str, str]:
    """Return the options of sbatch. Files are read, or their paths made absolute, for all jobs of the run."""
    directives = dict(options.get("sbatch", {}))
    for name in _PATH_DIRECTIVES & directives.keys():
        directives[name] = os.path.normpath(cwd / directives[name])
    for name in _NODE_DIRECTIVES & directives.keys():
        if "/" in directives[name]:
            directives[name] = _read_nodes(cwd / directives[name], name)
    return directives


def _read_nodes(path: Path, option: str) -> str:
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise SpecError(
            f"--{option} {str(path)!r} contains a slash, so it is the path of a file, which cannot be "
            f"read: {error}. Check its path, or name the nodes."
        ) from error
    return ",".join(filter(None, lines))


def _shell(options: SubmitOptions, cwd: Path) -> ShellSetup:
    conda, venv = options.get("conda"), options.get("venv")
    if conda is not None and is_conda_prefix(os.fspath(conda)):
        conda = os.path.normpath(cwd / conda)
    return ShellSetup(
        modules=tuple(options.get("module", ())),
        conda=None if conda is None else os.fspath(conda),
        venv=None if venv is None else os.path.normpath(cwd / venv),
        setup=tuple(options.get("setup", ())),
        teardown=tuple(options.get("teardown", ())),
    )


def _stage(options: SubmitOptions, cwd: Path) -> dict[str, str]:
    staged: dict[str, str] = {}
    for value in options.get("stage", ()):
        source, colon, name = value.partition(":")
        path = os.path.normpath(cwd / source)
        name = name if colon else ARCHIVE_SUFFIX.sub("", os.path.basename(path))
        if staged.setdefault(name, path) != path:
            raise SpecError(
                f"Both {staged[name]!r} and {path!r} have the name {name!r} (--stage). Choose another name: "
                f"--stage {source}:NAME."
            )
    return staged


def _container(options: SubmitOptions, backend: BackendName, cwd: Path) -> Container | None:
    if "container_image" not in options:
        return None
    image = os.fspath(options["container_image"])
    runtime = cast(ContainerRuntime, options["container_runtime"])
    if runtime == "pyxis" and backend == "local":
        raise SpecError(
            "pyxis is a Slurm plugin, so it cannot be used with --backend local. Use container_runtime "
            "apptainer, or remove --container-image."
        )
    mounts = []
    for mount in split_list_values(options.get("container_mounts", [])):
        source, colon, target = mount.partition(":")
        path = os.path.normpath(cwd / source)
        mounts.append(f"{path}:{target if colon else path}")
    return Container(
        image=os.path.normpath(cwd / image) if is_image_file(image) else image,
        runtime=runtime,
        mounts=tuple(mounts),
        env=split_list_values(options.get("container_env", [])),
        python=options.get("container_python", DEFAULT_PYTHON),
    )


def _torchrun(options: SubmitOptions) -> TorchrunConfig | None:
    launcher = options.get("launcher", "torchrun" if options.get("template") == "torchrun" else "srun")
    if launcher != "torchrun":
        return None
    rendezvous = {name: value for name, value in options.items() if name in TorchrunConfig.__struct_fields__}
    return TorchrunConfig(**cast(dict[str, Any], rendezvous))


def template_path(options: SubmitOptions, cwd: Path) -> str | None:
    if (template := options.get("template")) is None:
        return None
    text = os.fspath(template)
    return os.path.normpath(cwd / text) if is_template_path(text) else text


def is_plain_template(template: str | None) -> bool:
    """Return true if a template, given by its name or path, is `plain` or extends it."""
    if template is None or "/" not in template:
        return template == "plain"
    path = Path(template)
    try:
        parent = _EXTENDS.search(path.read_text(errors="replace"))
    except OSError:
        return False  # reported when the template is rendered
    if parent is None or parent[1] == "plain.sbatch.j2":
        return parent is not None
    # A template of the same name in its folder has precedence over a built-in one.
    return parent[1] != path.name and is_plain_template(str(path.parent / parent[1]))
