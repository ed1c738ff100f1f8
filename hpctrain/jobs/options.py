"""From the options of a submission, as a user gives them, to a `JobSpec` with every default filled in."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from hpctrain.errors import SpecError
from hpctrain.jobs.directives import check_directive
from hpctrain.jobs.duration import parse_duration
from hpctrain.jobs.spec import CONTROL_CHARACTER, BackendName, JobSpec

#: Options that are passed on to Slurm as directives of the same name.
DIRECTIVE_OPTIONS = ("partition", "account", "qos", "constraint", "exclude", "dependency", "mem")

#: Where runs live, under the folder in which they are submitted.
RUNS_FOLDER = "runs"

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)
_LONGEST_NAME_IN_ID = 40


class SubmitOptions(TypedDict, total=False):
    """Everything that can be asked of a submission besides the script and its arguments."""

    nodes: int | str
    gpus_per_node: int
    tasks_per_node: int
    cpus_per_task: int
    name: str
    #: `auto`, `slurm` or `local`.
    backend: str
    run_dir: str | os.PathLike[str]
    template: str
    #: Slurm's notation: minutes, HH:MM:SS, D-HH:MM:SS, …
    time: str
    #: Seconds before the time limit at which the ranks are told to save.
    signal_lead: int
    #: Crashes in a row, with no new checkpoint between them, that end the run.
    max_failures: int
    partition: str
    account: str
    qos: str
    constraint: str
    exclude: str
    dependency: str
    mem: str
    #: Any other option of sbatch, by its long name.
    sbatch: Mapping[str, str]
    #: More variables for the ranks.
    env: Mapping[str, str]


def check_names(options: Mapping[str, Any]) -> None:
    """See to it that every option exists.

    Raises:
        SpecError: one does not.
    """
    for name in options:
        if name not in SubmitOptions.__annotations__:
            from difflib import get_close_matches

            close = get_close_matches(name, SubmitOptions.__annotations__, 1)
            hint = (
                f"Did you mean {close[0]!r}?"
                if close
                else f"Take some of {', '.join(SubmitOptions.__annotations__)}."
            )
            raise SpecError(f"submit() has no option {name!r}. {hint}")


def build_spec(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    *,
    backend: BackendName,
    cwd: Path,
    python: str,
) -> JobSpec:
    """Fill in the defaults and check what can be checked without looking at the machine.

    Raises:
        SpecError: an option is wrong, or contradicts another.
    """
    path = cwd / script
    name = options.get("name", CONTROL_CHARACTER.sub("-", path.stem))
    time_limit = options.get("time")
    return JobSpec(
        script=os.path.normpath(path),
        args=tuple(map(str, args)),
        env=dict(options.get("env", {})),
        name=name,
        run_id=(run_dir := _run_dir(options, name, cwd)).name,
        run_dir=str(run_dir),
        backend=backend,
        nodes=_parse_nodes(options.get("nodes", 1)),
        gpus_per_node=options.get("gpus_per_node", 0),
        tasks_per_node=_positive("tasks-per-node", options.get("tasks_per_node")),
        cpus_per_task=options.get("cpus_per_task"),
        python=python,
        workdir=str(cwd),
        time_limit_s=None if time_limit is None else parse_duration(time_limit),
        signal_lead_s=_positive("signal-lead", options.get("signal_lead")),
        max_failures=options.get("max_failures", JobSpec.max_failures),
        directives=_directives(options),
        template=_template(options.get("template"), cwd),
    )


def _positive(option: str, value: int | None) -> int:
    """A number that has to be positive where it is given; 0 where it is not."""
    if value is None:
        return 0
    if value < 1:
        raise SpecError(f"--{option} is {value}, but it takes at least 1.")
    return value


def _run_dir(options: SubmitOptions, name: str, cwd: Path) -> Path:
    if (asked := options.get("run_dir")) is not None:
        return Path(os.path.normpath(cwd / asked))
    stem = _NOT_IN_ID.sub("-", name)[:_LONGEST_NAME_IN_ID].strip("-.") or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return cwd / RUNS_FOLDER / f"{stem}-{stamp}-{os.urandom(2).hex()}"


def _parse_nodes(value: int | str) -> int:
    if isinstance(value, int):
        return value
    if re.fullmatch(r"\d+\s*[:-]\s*\d+", value):
        raise SpecError(f"--nodes {value}: elastic node ranges are not supported yet. Give one number.")
    try:
        return int(value)
    except ValueError:
        raise SpecError(f"--nodes {value!r} is not a number. Give the number of nodes, such as 2.") from None


def _directives(options: SubmitOptions) -> dict[str, str]:
    given: Mapping[str, object] = options
    directives = {key: str(given[key]) for key in DIRECTIVE_OPTIONS if given.get(key) is not None}
    for key, value in directives.items():
        if not value:
            raise SpecError(f"--{key} is empty. Give it a value, or leave it out.")
    for key, value in options.get("sbatch", {}).items():
        check_directive(key)
        if key in directives and directives[key] != value:
            raise SpecError(
                f"--{key} is {directives[key]!r}, but --sbatch gives {key} as {value!r}. Give one of them."
            )
        directives[key] = value
    return directives


def _template(asked: str | None, cwd: Path) -> str | None:
    """A name stays a name; what looks like a path becomes absolute."""
    if asked is not None and ("/" in asked or asked.endswith(".j2")):
        return os.path.normpath(cwd / asked)
    return asked
