"""From the options of a submission, as they were settled, to a `JobSpec` with every default filled in."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hpctrain.errors import SpecError
from hpctrain.jobs.container import Container
from hpctrain.jobs.duration import parse_duration
from hpctrain.jobs.extra_directives import check_extra
from hpctrain.jobs.given import wrong_value
from hpctrain.jobs.launcher import Torchrun
from hpctrain.jobs.notify import DEFAULT_STALL_S, OCCASIONS, Notify
from hpctrain.jobs.options import SubmitOptions, is_template_path, options
from hpctrain.jobs.restart import read_changes
from hpctrain.jobs.shell import Shell, is_folder_of_conda
from hpctrain.jobs.spec import BackendName, JobSpec
from hpctrain.jobs.spec_checks import CONTROL_CHARACTER

#: Where runs live, under the folder in which they are submitted.
RUNS_FOLDER = "runs"

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)
_LONGEST_NAME_IN_ID = 40


def build_spec(
    script: str | os.PathLike[str],
    args: Sequence[str],
    given: SubmitOptions,
    *,
    backend: BackendName,
    cwd: Path,
    python: str,
    container: Container | None = None,
) -> JobSpec:
    """Fill in the defaults and check what can be checked without looking at the machine.

    Args:
        script: the Python script, a path seen from `cwd`.
        args: its command-line arguments.
        given: options as `Settings.options` has them.
        backend: where the job will run.
        cwd: the folder in which the script is to run.
        python: the interpreter of supervisor and ranks.
        container: what the ranks run in.

    Raises:
        SpecError: an option is wrong, or contradicts another.
    """
    path = cwd / script
    name = given.get("name", CONTROL_CHARACTER.sub("-", path.stem))
    gpu_type, gpus_per_node = _gpus(given.get("gpus_per_node", JobSpec.gpus_per_node))
    time_limit_s, directives = _time(given), _directives(given)
    if "time" in given and time_limit_s is None and backend == "slurm":
        # Without the option the partition's default counts.
        directives["time"] = "UNLIMITED"
    nodes = _nodes(given.get("nodes", JobSpec.nodes))
    shell = _shell(given, cwd)
    return JobSpec(
        script=os.path.normpath(path),
        args=tuple(map(str, args)),
        env=dict(given.get("env", {})),
        name=name,
        run_id=(run_dir := _run_dir(given, name, cwd)).name,
        run_dir=str(run_dir),
        backend=backend,
        array=None if (array := given.get("array")) is None else str(array),
        nodes=nodes[1],
        min_nodes=nodes[0],
        spares=given.get("spares", JobSpec.spares),
        node_check=given.get("node_check", JobSpec.node_check),
        grow_after_s=given.get("grow_after", JobSpec.grow_after_s),
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        gpu_directive=given.get("gpu_directive", JobSpec.gpu_directive),
        tasks_per_node=_positive("tasks-per-node", given.get("tasks_per_node")),
        cpus_per_task=given.get("cpus_per_task"),
        python=shell.python or python,
        workdir=str(cwd),
        time_limit_s=time_limit_s,
        signal_lead_s=_positive("signal-lead", given.get("signal_lead")),
        max_failures=given.get("max_failures", JobSpec.max_failures),
        restart=read_changes(cast(Mapping[str, str], given.get("restart", {}))),
        warm_workers_s=_seconds("warm-workers", given.get("warm_workers", JobSpec.warm_workers_s), 0),
        hang_limit_s=_seconds("hang-limit", given.get("hang_limit", JobSpec.hang_limit_s), 1),
        continue_by=given.get("continue_by", JobSpec.continue_by),
        directives=directives,
        template=_template(given.get("template"), cwd),
        shell=shell,
        torchrun=_torchrun(given),
        container=container,
        notify=Notify(
            targets=tuple(given.get("notify", ())),
            on=tuple(given.get("notify_on", OCCASIONS)),
            stall_s=given.get("notify_stall_after", DEFAULT_STALL_S),
        ),
    )


def check_value(name: str, value: object) -> None:
    """See to it that an option may have this value, as far as that can be told of it alone.

    Raises:
        SpecError: it may not.
    """
    if (option := options().get(name)) is None:
        return
    try:
        taken = option.kind.take(value)
    except ValueError:
        raise SpecError(wrong_value(name, value, option)) from None
    readers: dict[str, Callable[[Any], object]] = {"nodes": _nodes, "gpus_per_node": _gpus}
    if (read := readers.get(name)) is not None:
        read(taken)


def _positive(option: str, value: int | None) -> int:
    """A number that has to be positive where it is given; 0 where it is not."""
    if value is None:
        return 0
    if value < 1:
        raise SpecError(f"--{option} is {value}, but it takes at least 1.")
    return value


def _seconds(option: str, value: int | str | None, least: int) -> int | None:
    """A number of seconds; None for `never`."""
    if not isinstance(value, int):
        return None
    if value < least:
        raise SpecError(f"--{option} is {value}, but it takes at least {least} seconds, or never.")
    return value


def _run_dir(given: SubmitOptions, name: str, cwd: Path) -> Path:
    if (asked := given.get("run_dir")) is not None:
        path = Path(os.path.normpath(cwd / asked))
        if not path.name:
            raise SpecError(
                f"--run-dir is {os.fspath(asked)!r}, which has no name that could be the run's id. "
                "Choose a folder below it."
            )
        return path
    return cwd / RUNS_FOLDER / new_run_id(name)


def new_run_id(name: str) -> str:
    """A run id for a job of that name; two of the same second hardly ever meet."""
    stem = _NOT_IN_ID.sub("-", name)[:_LONGEST_NAME_IN_ID].strip("-.") or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _nodes(value: int | str) -> tuple[int, int]:
    """The least and the most nodes, from `2:4` or a number alone."""
    if isinstance(value, int):
        return value, value
    if match := re.fullmatch(r"(\d+):(\d+)", value, re.ASCII):
        least, most = int(match[1]), int(match[2])
        if 1 <= least <= most:
            return least, most
        raise SpecError(
            f"--nodes {value}: the least number of nodes is {least}, and the most {most}, but it takes "
            "1 ≤ MIN ≤ MAX, such as 2:4."
        )
    raise SpecError(
        f"--nodes {value!r} is neither a number nor a range. Give the number of nodes, such as 2, or the "
        "least and the most, such as 2:4."
    )


def _gpus(value: int | str) -> tuple[str | None, int]:
    """Type and number of GPUs, from `h100:8` or a number alone."""
    if isinstance(value, int):
        return None, value
    gpu_type, _, number = value.rpartition(":")
    if not gpu_type or not (number.isascii() and number.isdecimal()):
        raise SpecError(f"--gpus-per-node is {value!r}, but it takes a number, such as 8 or h100:8.")
    return gpu_type, int(number)


def _time(given: SubmitOptions) -> float | None:
    """Seconds until the job's time is over; None where no number of them is given."""
    return None if (limit := given.get("time")) is None else parse_duration(str(limit))


def _directives(given: SubmitOptions) -> dict[str, str]:
    values = cast(Mapping[str, object], given)
    named = {
        option.flag[2:]: "" if value is True else str(value)
        for name, option in options().items()
        if option.about.directive and (value := values.get(name)) is not None and value is not False
    }
    return named | check_extra(given.get("sbatch", {}))


def _shell(given: SubmitOptions, cwd: Path) -> Shell:
    conda = given.get("conda")
    if conda is not None and is_folder_of_conda(os.fspath(conda)):
        conda = os.path.normpath(cwd / conda)
    venv = given.get("venv")
    return Shell(
        modules=tuple(given.get("module", ())),
        conda=None if conda is None else os.fspath(conda),
        venv=None if venv is None else os.path.normpath(cwd / venv),
        setup=tuple(given.get("setup", ())),
    )


def _torchrun(given: SubmitOptions) -> Torchrun | None:
    launcher = given.get("launcher", "torchrun" if given.get("template") == "torchrun" else "srun")
    if launcher != "torchrun":
        return None
    return Torchrun(
        rdzv_backend=given.get("rdzv_backend", Torchrun.rdzv_backend),
        rdzv_endpoint=given.get("rdzv_endpoint"),
    )


def _template(asked: str | os.PathLike[str] | None, cwd: Path) -> str | None:
    """A name stays a name; what looks like a path becomes absolute."""
    if asked is None:
        return None
    text = os.fspath(asked)
    return os.path.normpath(cwd / text) if is_template_path(text) else text
