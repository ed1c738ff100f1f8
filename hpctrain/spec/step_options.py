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


#: Options of srun(1) that the supervisor sets, and their replacements.
_RESERVED = {
    "chdir": "A rank runs in the folder of the submission",
    "cpus-per-task": "Use --cpus-per-task of hpctrain submit",
    "error": "Logs are in the run folder",
    "export": "Use --env",
    "input": "Ranks have no standard input",
    "job-name": "Use --name",
    "kill-on-bad-exit": "The supervisor decides what to do when a rank exits",
    "label": "Each rank has a log of its own",
    "mpi": "Use --mpi of hpctrain submit",
    "multi-prog": "All ranks run the same program",
    "nodelist": "Use --nodelist of hpctrain submit",
    "nodes": "Use --nodes of hpctrain submit",
    "ntasks": "Use --ntasks-per-node of hpctrain submit",
    "ntasks-per-node": "Use --ntasks-per-node of hpctrain submit",
    "output": "Logs are in the run folder",
    "overlap": "The supervisor sets it",
    "exact": "The supervisor sets --overlap",
    "exclusive": "The supervisor sets --overlap. For whole nodes, use --exclusive of hpctrain submit",
    "pty": "Use hpctrain shell",
    "quit-on-interrupt": "The supervisor handles signals",
    "relative": "The supervisor chooses the nodes of the step",
    "wait": "The supervisor decides what to do when a rank exits",
}
_SHORT = {
    "c": "cpus-per-task", "D": "chdir", "e": "error", "i": "input", "J": "job-name", "K": "kill-on-bad-exit",
    "l": "label", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output", "r": "relative",
    "W": "wait", "w": "nodelist",
}  # fmt: skip


def check_srun_args(srun_args: tuple[str, ...]) -> None:
    """Check that the user's options of srun do not change what the supervisor relies on.

    Raises:
        SpecError: a value is not a single option, or the supervisor sets this option.
    """
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
        if name in _RESERVED:
            raise SpecError(f"--srun-arg cannot set --{name}. {_RESERVED[name]}.")
        if name == "distribution" and value.partition(":")[0] not in ("block", "*"):
            raise SpecError(
                f"{option!r} (--srun-arg) changes the order of the ranks, but the ranks of a node must have "
                "consecutive numbers. Use block, such as --distribution=block:cyclic."
            )
