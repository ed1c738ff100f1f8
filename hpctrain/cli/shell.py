"""Open a shell with the resources of a run (`hpctrain shell`), or on a rank's node (`hpctrain attach`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins
from msgspec.structs import replace

from hpctrain.cli import submit
from hpctrain.cli.common import open_run, run_argument
from hpctrain.cli.exec import become, terminal_options
from hpctrain.cli.resume import repeated_options
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.options.resolved_options import COMMAND_LINE_SOURCE, previous_values
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.render import render_setup
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.slurm.batch_header import parse_batch_header
from hpctrain.slurm.environment import apply_env_defaults, sbatch_env, strip_job_env

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run

#: Options of a submission that do not affect a shell.
_WITHOUT_EFFECT = frozenset(
    {
        *("array", "begin", "dependency", "spare_nodes", "node_check", "scale_up_after", "run_dir"),
        *("max_failures", "restart_policy", "standby_workers", "hang_timeout", "mpi", "cpu_binding"),
        *("independent_ranks", "resume_mode", "code_snapshot", "code_snapshot_limit", "stop_before_limit"),
        *("launcher", "rdzv_backend", "rdzv_endpoint", "mail_type", "mail_user"),
        *("notify", "notify_on", "notify_stall_after", "stage", "stage_environment"),
        *("show_config", "dry_run", "follow", "as_json", "as_module"),
    }
)
#: Options of sbatch that salloc does not accept or that do not apply to a shell.
_NOT_OF_SALLOC = frozenset(
    {
        *("array", "error", "export", "export-file", "ignore-pbs", "input", "no-requeue", "open-mode"),
        *("output", "parsable", "propagate", "requeue", "wait", "wrap", "chdir", "signal"),
    }
)
_SETUP_VARIABLE = "HPCTRAIN_SHELL_SETUP"
#: Takes the batch script from a variable: other users can read command lines.
_RUN_SETUP = f'setup="${_SETUP_VARIABLE}"; unset {_SETUP_VARIABLE} SLURM_EXIT_ERROR; eval "$setup"'


@click.command("shell", cls=submit.HiddenSubmitOptions, context_settings=submit.command.context_settings)
@click.option("--like", metavar="RUN", help="Use the options and the working directory of this run.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND [ARGS]...]")
def command(
    argv: tuple[str, ...], like: str | None, assignments: tuple[str, ...], **options_given: Any
) -> None:
    """Open a shell in a new job, with the resources and the environment of a run, or run COMMAND there.

    \b
        hpctrain shell --nodes 2 --gpus-per-node 4 --time 1:00:00
        hpctrain shell --like RUN
        hpctrain shell --gpus-per-node 1 -- jupyter lab --no-browser

    Accepts the options of `hpctrain submit` for resources, queue, environment and container. The shell runs
    on the first node, and the job ends when the shell exits. Without Slurm, the shell runs on this machine.
    """  # noqa: D301
    cwd, previous = Path.cwd(), None
    if like is not None:
        spec = load_spec(open_run(like, Path(options_given["runs_dir"] or "runs")).dir.spec)
        options = repeated_options(to_builtins(spec))
        cwd = Path(spec.workdir)
        previous = previous_values({name: options[name] for name in options.keys() - _WITHOUT_EFFECT})
    program, *args = argv or ("bash",)
    submission = prepare_submission(
        program,
        args,
        {name: value for name, value in options_given.items() if value is not None},  # type: ignore[arg-type]
        source=COMMAND_LINE_SOURCE,
        assignments=assignments,
        previous=previous,
        environ=os.environ,
        cwd=cwd,
        python=sys.executable,
        program="command",
        is_run=False,
    )
    for line in (*submission.notes, *submission.forecast):
        click.echo(line, err=True)
    submission.raise_refusal("Slurm would reject this job")
    _become_shell(submission.spec, argv, submission.script)


def _become_shell(spec: JobSpec, argv: Sequence[str], script: str) -> None:
    # Imported here because the package of the supervisor is slow to import.
    from hpctrain.supervisor.launch.container_command import containerize
    from hpctrain.supervisor.launch.task_command import prefixed, restore_names_command

    default = "bash" if spec.container else os.environ.get("SHELL", "bash")
    inner = restore_names_command([*argv] or [default], spec.env)
    defaults = {"OMP_NUM_THREADS": str(spec.cpus_per_task or 1)}
    variables = {**prefixed(spec.env), _SETUP_VARIABLE: render_setup(spec)}
    # There is no run folder to mount.
    mounted = replace(spec, run_dir=spec.workdir)
    contained = containerize(mounted, inner, [*variables, *defaults], os.environ.get("PATH"))
    inner = ["/bin/bash", "-c", _RUN_SETUP, "bash", *contained.command]
    terminal = terminal_options()
    os.chdir(spec.workdir)
    if spec.backend == "local":
        become(inner, apply_env_defaults({**strip_job_env(os.environ), **variables}, defaults))
    header = parse_batch_header(script, "the batch script")
    directives = {name: value for name, value, _ in header.directives}
    options = [
        f"--{name}={value}" if value else f"--{name}"
        for name, value in directives.items()
        if name not in _NOT_OF_SALLOC
    ]
    environ = sbatch_env(os.environ, directives)
    environ |= {**variables, "SLURM_EXIT_ERROR": str(SchedulerError.exit_code)}
    if contained.srun_options:
        # The setup runs outside the container, as in a run.
        nested = ["srun", "--overlap", "--relative=0", "--nodes=1", "--ntasks=1", *terminal]
        inner[4:] = [*nested, *contained.srun_options, *contained.command]
    # A step that leaves all resources of the job to later steps.
    step = ["srun", "--interactive", "--preserve-env", *terminal, *inner]
    become(["salloc", *options, *step], apply_env_defaults(environ, defaults))


command.params += submit.hidden_options(_WITHOUT_EFFECT)


@click.command("attach")
@run_argument
@click.option("--rank", type=click.IntRange(min=0), default=0, metavar="R", help="Rank to use.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND [ARGS]...]")
def attach_command(run: Run, rank: int, program: tuple[str, ...]) -> None:
    """Open a shell on the node of a running rank of RUN, or run COMMAND there.

    The shell uses the rank's container image, working directory and environment, and ends when the job ends.
    Variables that would connect a process to the run are not set.
    """
    # Imported here because these packages are slow to import.
    from hpctrain.jobs.runs.run import require_running_ranks
    from hpctrain.supervisor.launch.container_command import containerize
    from hpctrain.supervisor.launch.task_command import module_command

    status, started = require_running_ranks(run, [rank], option="--rank", done="attached to")
    spec = load_spec(run.dir.spec)
    if spec.program == "batch":
        remedy = "They run on this machine."
        if spec.backend == "slurm":
            remedy = f"Open a shell on their node: srun --jobid={status.job_id} --overlap --pty bash"
        raise SpecError(f"Run {run.run_id} is a batch script, which starts its ranks itself. {remedy}")
    program = program or ("bash" if spec.container else os.environ.get("SHELL", "bash"),)
    command = module_command(spec, "program.attach")
    command += [str(run.dir), str(started.attempt), str(rank), *program]
    contained = containerize(spec, command, ["TERM"], os.environ.get("PATH"))
    outer = strip_job_env(os.environ)
    if spec.backend == "local":
        become(contained.command, outer)
    host = (started.hosts or [])[rank // spec.ntasks_per_node]
    _check_node(host, rank, outer)
    step = [
        *("srun", f"--jobid={_number_of(str(status.job_id), outer)}", f"--nodelist={host}", "--overlap"),
        *("--nodes=1", "--ntasks=1", "--mpi=none", f"--chdir={spec.workdir}", *terminal_options()),
    ]
    outer["SLURM_EXIT_ERROR"] = str(SchedulerError.exit_code)
    become([*step, *contained.srun_options, *contained.command], outer)


def _check_node(host: str, rank: int, environ: Mapping[str, str]) -> None:
    """Check that the node responds: srun would wait for it."""
    from hpctrain.slurm.node_queries import query_nodes

    for node in query_nodes([host], environ):
        if "DOWN" in node.state or node.state.endswith("*") or "NOT_RESPONDING" in node.state:
            raise SchedulerError(
                f"The node {host} of rank {rank} does not respond: its state in Slurm is {node.state}. Use "
                "`hpctrain status` to see whether the run has restarted without this node."
            )


def _number_of(job_id: str, environ: Mapping[str, str]) -> str:
    """Return the number of a job. srun does not accept the name of an array task."""
    from hpctrain.slurm.command import run_slurm

    if "_" not in job_id:
        return job_id
    return run_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A"], environ).strip()
