"""Run a shell or another program beside a running rank (`hpctrain attach`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from hpctrain.cli.common import open_run, run_argument
from hpctrain.cli.exec import become
from hpctrain.errors import SchedulerError
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.environment import strip_job_env


@click.command("attach")
@run_argument
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="R", help="Rank to use."
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND [ARGS]...]")
def command(run: str, runs_dir: Path, rank: int, program: tuple[str, ...]) -> None:
    """Open a shell on the node of a running rank of RUN, or run COMMAND there.

    The shell uses the rank's container image, working directory and environment, and ends when the job ends.
    Variables that would connect a process to the run are not set.
    """
    # Imported here because these packages are slow to import.
    from hpctrain.jobs.runs.run import require_running_ranks
    from hpctrain.jobspec.load_spec import load_spec
    from hpctrain.supervisor.launch.task_command import containerize, module_command

    opened = open_run(run, runs_dir)
    status, started = require_running_ranks(opened, [rank], option="--rank", done="attached to")
    spec = load_spec(opened.dir.spec)
    program = program or ("bash" if spec.container else os.environ.get("SHELL", "bash"),)
    command = module_command(spec, "program.attach")
    command += [str(opened.dir), str(started.attempt), str(rank), *program]
    contained = containerize(spec, command, ["TERM"], os.environ.get("PATH"))
    outer = strip_job_env(os.environ)
    if spec.backend == "local":
        become(contained.command, outer)
    host = (started.hosts or [])[rank // spec.ntasks_per_node]
    _check_node(host, rank, outer)
    step = [
        *("srun", f"--jobid={_number_of(str(status.job_id), outer)}", f"--nodelist={host}", "--overlap"),
        *("--nodes=1", "--ntasks=1", "--mpi=none", f"--chdir={spec.workdir}"),
        *(["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []),
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
    if "_" not in job_id:
        return job_id
    return run_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A"], environ).strip()
