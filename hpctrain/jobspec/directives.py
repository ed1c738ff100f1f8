"""The `#SBATCH` lines of a job, quoted for sbatch's parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.jobspec.batch_header import HET_BORDER, has_value
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.slurm.duration import format_time_limit

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=~^*-]*", re.ASCII)


def all_directives(spec: JobSpec) -> dict[str, str]:
    """Return all options of the job by long name, in script order. A flag has an empty value."""
    if spec.program == "batch":
        return _batch_directives(spec)
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


def _batch_directives(spec: JobSpec) -> dict[str, str]:
    """Return the user's options of a batch script unchanged, and the defaults of the others."""
    # Slurm replaces the symbols that begin with %.
    folder = spec.workdir.replace("%", "%%")
    defaults = {
        "job-name": spec.name,
        "chdir": spec.run_dir,
        "output": f"{folder}/slurm-{'%j' if spec.array is None else '%A_%a'}.out",
        "open-mode": "append",
        "requeue": "expedite" if spec.expedite_requeue else "",
        # Only the supervisor receives the signal.
        "signal": f"B:USR2@{spec.stop_before_limit_s}",
    }
    if "no-requeue" in spec.directives:
        del defaults["requeue"]
    return {**({} if spec.array is None else {"array": spec.array}), **defaults, **spec.directives}


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


def directive_lines(directives: Mapping[str, str], origins: Mapping[str, str] | None = None) -> list[str]:
    """Format the directives as `#SBATCH` lines of a batch script, with comments on their origins."""
    comments = {key: f"  # {origin}" for key, origin in (origins or {}).items()}
    return [
        f"#SBATCH --{key}{f'={quote_directive(value)}' if value or has_value(key) else ''}"
        f"{comments.get(key, '')}"
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
    if _PLAIN.fullmatch(value) and not HET_BORDER.search(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + HET_BORDER.sub(r"\1\\", escaped) + '"'
