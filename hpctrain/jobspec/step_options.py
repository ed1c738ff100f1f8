"""Build the command of a job step: the options of srun, and the program of each rank."""

from __future__ import annotations

from hpctrain.errors import SpecError
from hpctrain.jobspec.batch_header import SHORT_NAMES
from hpctrain.jobspec.job_spec import JobSpec


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
        case "command":
            return [spec.script, *spec.args]
        case "module":
            return [python, "-m", spec.script, *spec.args]
        case "batch":
            return [spec.script, *spec.args]
        case "script":
            return [python, spec.script, *spec.args]


#: Options of srun(1) that change what the supervisor relies on.
_RESERVED = (
    *("attach", "begin", "chdir", "cpus-per-task", "disable-status", "error", "exact", "exclude"),
    *("exclusive", "export", "export-file", "get-user-env", "help", "immediate", "input", "job-name"),
    *("jobid", "kill-on-bad-exit", "label", "mpi", "multi-prog", "no-allocate", "no-kill", "nodefile"),
    *("nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "overlap", "pty"),
    *("quit-on-interrupt", "relative", "signal", "tasks-per-node", "test-only", "time", "time-min"),
    *("usage", "version", "wait"),
)
#: Short names that sbatch does not have, or with another meaning.
_SRUN_NAMES = {
    **SHORT_NAMES,
    "a": "attach",
    "h": "help",
    "I": "immediate",
    "K": "kill-on-bad-exit",
    "k": "no-kill",
    "l": "label",
    "m": "distribution",
    "r": "relative",
    "V": "version",
    "Z": "no-allocate",
}


def check_srun_args(srun_args: tuple[str, ...]) -> None:
    """Check that the user's options of srun do not change what the supervisor relies on."""
    for option in srun_args:
        name, _, value = option.lstrip("-").partition("=")
        if not option.startswith("-") or not name or any(map(str.isspace, name)):
            raise SpecError(
                f"{option!r} (--srun-arg) is not an option of srun. Write one option with its value, such as "
                "--srun-arg=--cpu-bind=cores."
            )
        if not option.startswith("--"):
            value = name[1:]
            name = _SRUN_NAMES.get(name[0], name[0])
        # srun completes unique beginnings of names.
        if reserved := next((key for key in _RESERVED if key.startswith(name)), None):
            raise SpecError(
                f"--srun-arg cannot set --{reserved}, which hpctrain sets itself or which would prevent the "
                "ranks from starting. Use the options of `hpctrain submit`."
            )
        if name == "distribution" and value.partition(":")[0] not in ("block", "*"):
            raise SpecError(
                f"{option!r} (--srun-arg) changes the order of the ranks, but the ranks of a node must have "
                "consecutive numbers. Use block, such as --distribution=block:cyclic."
            )
