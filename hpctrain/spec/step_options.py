"""Build the command of a job step: the options of srun, and the program of each rank."""

from __future__ import annotations

from hpctrain.errors import SpecError
from hpctrain.spec.job_spec import JobSpec


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
    """Return the command of each rank, as the user would start it."""
    python = spec.python if spec.container is None else spec.container.python
    match spec.program:
        case "command":
            return [spec.script, *spec.args]
        case "module":
            return [python, "-m", spec.script, *spec.args]
        case "script":
            return [python, spec.script, *spec.args]


#: Options of srun(1) that change what the supervisor relies on, and their replacements.
_RESERVED = {
    **dict.fromkeys(("chdir", "get-user-env"), "A rank runs in the folder of the submission"),
    **dict.fromkeys(("output", "error", "open-mode"), "Logs are in the run folder"),
    **dict.fromkeys(("export", "export-file"), "Use --env"),
    **dict.fromkeys(("input", "pty"), "Ranks have no standard input. Use hpctrain shell"),
    **dict.fromkeys(("kill-on-bad-exit", "wait"), "The supervisor decides what to do when a rank exits"),
    **dict.fromkeys(
        ("overlap", "exact", "exclusive"), "The supervisor shares the allocation among its steps"
    ),
    **dict.fromkeys(("attach", "jobid", "no-allocate", "relative"), "The supervisor chooses the allocation"),
    **dict.fromkeys(("nodelist", "nodefile", "exclude"), "Use --nodelist or --exclude of hpctrain submit"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node"), "Use --ntasks-per-node"),
    **dict.fromkeys(("help", "usage", "version", "test-only"), "srun would start no rank"),
    **dict.fromkeys(("signal", "quit-on-interrupt", "disable-status"), "The supervisor handles signals"),
    **dict.fromkeys(("time", "time-min", "begin", "immediate"), "A step has the time of its job. Use --time"),
    "cpus-per-task": "Use --cpus-per-task of hpctrain submit",
    "job-name": "Use --name",
    "label": "Each rank has a log of its own",
    "mpi": "Use --mpi of hpctrain submit",
    "multi-prog": "All ranks run the same program",
    "no-kill": "The supervisor already handles lost nodes",
    "nodes": "Use --nodes of hpctrain submit",
}
_SHORT = {
    "c": "cpus-per-task", "D": "chdir", "e": "error", "i": "input", "J": "job-name", "K": "kill-on-bad-exit",
    "l": "label", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output", "r": "relative",
    "A": "attach", "h": "help", "I": "immediate", "k": "no-kill", "t": "time", "V": "version", "W": "wait",
    "w": "nodelist", "x": "exclude", "Z": "no-allocate",
}  # fmt: skip


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
            name = _SHORT.get(name[0], name[0])
        # srun completes unique beginnings of names.
        if reserved := next((key for key in _RESERVED if key.startswith(name)), None):
            raise SpecError(f"--srun-arg cannot set --{reserved}. {_RESERVED[reserved]}.")
        if name == "distribution" and value.partition(":")[0] not in ("block", "*"):
            raise SpecError(
                f"{option!r} (--srun-arg) changes the order of the ranks, but the ranks of a node must have "
                "consecutive numbers. Use block, such as --distribution=block:cyclic."
            )
