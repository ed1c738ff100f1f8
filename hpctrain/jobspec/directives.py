"""The `#SBATCH` lines of a job, quoted for sbatch's parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.slurm.duration import format_time_limit

#: Short names of sbatch's options, except those that `hpctrain submit` uses differently.
SHORT_NAMES = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "G": "gpus", "H": "hold", "i": "input", "J": "job-name", "L": "licenses",
    "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip

# Words at which sbatch splits the components of a heterogeneous job, anywhere in an #SBATCH line.
_HET_BORDER = re.compile(r"(pack|het)(?=job)", re.IGNORECASE)

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=~^*-]*", re.ASCII)


def all_directives(spec: JobSpec) -> dict[str, str]:
    """Return all options of the job by long name, in script order. A flag has an empty value."""
    directives = {"job-name": spec.name}
    if spec.array is not None:
        directives["array"] = spec.array
    if spec.is_elastic:
        # With --ntasks-per-node, the job would have as many tasks as fit on MIN nodes, and no more nodes than
        # tasks (seen with Slurm 22.05). Therefore, request one task per node, with the CPUs of all ranks.
        directives["nodes"] = f"{spec.least_granted}-{spec.most_granted}"
    else:
        directives |= {"nodes": str(spec.most_granted), "ntasks-per-node": str(spec.ntasks_per_node)}
    if spec.gpus_per_node:
        directives |= _gpus(spec)
    if spec.is_elastic:
        directives["cpus-per-task"] = str(spec.ntasks_per_node * (spec.cpus_per_task or 1))
    elif spec.cpus_per_task is not None:
        directives["cpus-per-task"] = str(spec.cpus_per_task)
    if spec.time_limit_s is not None:
        directives["time"] = format_time_limit(spec.time_limit_s)
    directives |= {
        "chdir": spec.run_dir,
        "output": _log(spec),
        "open-mode": "append",
        "requeue": "expedite" if spec.expedite_requeue else "",
        **({"signal": f"USR2@{spec.stop_before_limit_s}"} if spec.supervised else {}),
        "export": "ALL",
    }
    return directives | {key: value for key, value in spec.directives.items() if key not in directives}


def _gpus(spec: JobSpec) -> dict[str, str]:
    """Return the request for GPUs, merged with the request for other generic resources of a node."""
    gpus = f"{spec.gpu_type}:{spec.gpus_per_node}" if spec.gpu_type else str(spec.gpus_per_node)
    if spec.gpu_request_style != "gres":
        return {spec.gpu_request_style: gpus}
    return {"gres": ",".join(filter(None, [f"gpu:{gpus}", spec.directives.get("gres")]))}


def directives_after_start(directives: Mapping[str, str]) -> dict[str, str]:
    """Return the directives of a job that continues a run, without those that delayed the first job."""
    lasting = {key: value for key, value in directives.items() if key not in ("begin", "dependency", "hold")}
    if "singleton" in re.split("[,?]", directives.get("dependency", "")):
        lasting["dependency"] = "singleton"
    return lasting


def directive_lines(directives: Mapping[str, str]) -> list[str]:
    """Format the directives as `#SBATCH` lines of a batch script."""
    return [
        f"#SBATCH --{key}={quote_directive(value)}" if value else f"#SBATCH --{key}"
        for key, value in directives.items()
    ]


def _log(spec: JobSpec) -> str:
    """Return the log path as a file name pattern (sbatch(1), section FILENAME PATTERN)."""
    run = RunDir(Path(spec.run_dir.replace("%", "%%")))
    return str((run if spec.array is None else run.task("%a")).slurm_log)


def quote_directive(value: str) -> str:
    r"""Quote a value so that sbatch reads it back unchanged from an `#SBATCH` line.

    The rules, from `_get_argument` in Slurm's src/sbatch/opt.c: quotes group; a backslash escapes the next
    character, also inside quotes, but not a space outside quotes; an unquoted # starts a comment; newlines
    are not supported. Nothing is expanded.
    """
    if _PLAIN.fullmatch(value) and not _HET_BORDER.search(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _HET_BORDER.sub(r"\1\\", escaped) + '"'
