"""The `#SBATCH` lines of a job, and how sbatch reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.jobs.duration import format_duration
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir

# Words inside which sbatch looks for the border between the parts of a heterogeneous job, wherever
# they stand in an #SBATCH line.
_HET_BORDER = re.compile(r"(pack|het)(?=job)", re.IGNORECASE)

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=~^*-]*", re.ASCII)


def directives_of(spec: JobSpec) -> dict[str, str]:
    """All options of the job by their long names, in the order of the script; a flag has no value."""
    directives = {"job-name": spec.name}
    if spec.array is not None:
        directives["array"] = spec.array
    if spec.is_elastic:
        # With --ntasks-per-node the job would have as many tasks as MIN nodes hold, and no more nodes than
        # tasks (seen with Slurm 22.05). So it asks for one task a node, with the CPUs of all ranks.
        directives["nodes"] = f"{spec.least_granted}-{spec.most_granted}"
    else:
        directives |= {"nodes": str(spec.most_granted), "ntasks-per-node": str(spec.tasks_per_node)}
    if spec.gpus_per_node:
        directives |= _gpus(spec)
    if spec.is_elastic:
        directives["cpus-per-task"] = str(spec.tasks_per_node * (spec.cpus_per_task or 1))
    elif spec.cpus_per_task is not None:
        directives["cpus-per-task"] = str(spec.cpus_per_task)
    if spec.time_limit_s is not None:
        directives["time"] = format_duration(spec.time_limit_s)
    directives |= {
        "chdir": spec.run_dir,
        "output": _log(spec),
        "open-mode": "append",
        "requeue": "",
        "signal": f"USR2@{spec.signal_lead_s}",
        "export": "ALL",
    }
    return directives | {key: value for key, value in spec.directives.items() if key not in directives}


def _gpus(spec: JobSpec) -> dict[str, str]:
    """The request for GPUs, next to that for other resources of a node."""
    gpus = f"{spec.gpu_type}:{spec.gpus_per_node}" if spec.gpu_type else str(spec.gpus_per_node)
    if spec.gpu_directive != "gres":
        return {spec.gpu_directive: gpus}
    return {"gres": ",".join(filter(None, [f"gpu:{gpus}", spec.directives.get("gres")]))}


def directive_lines(directives: Mapping[str, str]) -> list[str]:
    """The directives as `#SBATCH` lines of a batch script."""
    return [
        f"#SBATCH --{key}={quote_directive(value)}" if value else f"#SBATCH --{key}"
        for key, value in directives.items()
    ]


def _log(spec: JobSpec) -> str:
    r"""The file of the job's output, as a file name pattern (sbatch(1), section FILENAME PATTERN).

    A backslash anywhere in a pattern switches its symbols off, and takes the character after it as it is;
    %% stands for %, and %a for the number of the array's task.
    """
    if spec.array is None:
        return re.sub(r"[\\%]", r"\\\g<0>", str(RunDir(Path(spec.run_dir)).slurm_log))
    return str(RunDir(Path(spec.run_dir.replace("%", "%%"))).task("%a").slurm_log)


def quote_directive(value: str) -> str:
    r"""Quote a value so that sbatch reads it back unchanged from an `#SBATCH` line.

    The rules, from `_get_argument` in Slurm's src/sbatch/opt.c: quotes group; a backslash takes the
    next character as it is, inside quotes too, but cannot protect a blank outside of them; an
    unquoted # starts a comment; there is no way to write a newline. Nothing is expanded.
    """
    if _PLAIN.fullmatch(value) and not _HET_BORDER.search(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _HET_BORDER.sub(r"\1\\", escaped) + '"'
