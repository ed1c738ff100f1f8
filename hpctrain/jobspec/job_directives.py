"""Determine the options of sbatch and srun for a job, and the command of its ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.slurm.parsing import format_time_limit


def job_directives(spec: JobSpec) -> dict[str, str]:
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
    # The path of the log is a file name pattern (sbatch(1), section FILENAME PATTERN).
    run = RunDir(Path(spec.run_dir.replace("%", "%%")))
    directives |= {
        "chdir": spec.run_dir,
        "output": str((run if spec.array is None else run.task("%a")).slurm_log),
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
        **({} if spec.array is None else {"array": spec.array}),
        "job-name": spec.name,
        "chdir": spec.run_dir,
        "output": f"{folder}/slurm-{'%j' if spec.array is None else '%A_%a'}.out",
        "open-mode": "append",
        **(
            {}
            if "no-requeue" in spec.directives
            else {"requeue": "expedite" if spec.expedite_requeue else ""}
        ),
        # Only the supervisor receives the signal.
        "signal": f"B:USR2@{spec.stop_before_limit_s}",
    }
    return {**defaults, **spec.directives}


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


def srun_options(spec: JobSpec, num_nodes: int) -> list[str]:
    """Return the options with which srun starts the ranks, or the torchrun agents, on that many nodes."""
    processes = spec.processes_per_node
    options = [
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes * processes}",
        f"--ntasks-per-node={processes}",
        "--distribution=block",
        "--export=ALL",
        "--input=none",
        f"--mpi={spec.mpi}",
        f"--chdir={spec.workdir}",
    ]
    if spec.supervised:
        options += [
            # The supervisor, not the site's default, decides how the exit of a task affects the others.
            "--kill-on-bad-exit=0",
            "--wait=0",
            # For Slurm, another step holds the CPUs and GPUs. For standby workers, this is the running step.
            # Otherwise it is the previous step, whose end Slurm may detect late, or only after marking a lost
            # node down.
            "--overlap",
        ]
    else:
        options.append("--kill-on-bad-exit=1")
    if spec.cpus_per_task is not None or spec.torchrun is not None or spec.is_elastic:
        # Since 22.05, srun does not inherit this from sbatch; an agent has the CPUs of all its ranks.
        cpus = (spec.cpus_per_task or 1) * spec.ntasks_per_node // processes
        options.append(f"--cpus-per-task={cpus}")
    return [*options, *spec.srun_args]


def program_words(spec: JobSpec) -> list[str]:
    python = spec.python if spec.container is None else spec.container.python
    match spec.program:
        case "command" | "batch":
            return [spec.script, *spec.args]
        case "module":
            return [python, "-m", spec.script, *spec.args]
        case "script":
            return [python, spec.script, *spec.args]
