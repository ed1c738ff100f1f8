"""`hpctrain submit`: from a script to a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.common import echo_json, handle_of, json_option, program, short_path
from hpctrain.jobs.prepare import prepare


def _pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:  # noqa: ARG001
    """Read KEY=VALUE; the last of a key counts."""
    pairs = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE.")
        pairs[key] = rest
    return pairs


def _directives(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Read KEY=VALUE, or KEY alone for a flag; dashes before the key are no part of it."""
    named = [value.lstrip("-") for value in values]
    return _pairs(ctx, param, [value if "=" in value else f"{value}=" for value in named])


@click.command("submit", context_settings={"allow_interspersed_args": False})
@click.option("--nodes", metavar="N", help="Number of nodes.  [default: 1]")
@click.option(
    "--gpus-per-node",
    type=int,
    metavar="G",
    help="GPUs, and ranks, on each node; 0 runs on CPUs.  [default: 0]",
)
@click.option(
    "--tasks-per-node", type=int, metavar="T", help="Ranks on each node of a run on CPUs.  [default: 1]"
)
@click.option("--cpus-per-task", type=int, metavar="C", help="CPUs of each rank.")
@click.option("--name", help="Name of the job.  [default: the script's]")
@click.option(
    "--backend",
    metavar="auto|slurm|local",
    help="Where to run; auto takes Slurm where it answers.  [default: auto]",
)
@click.option(
    "--run-dir",
    metavar="PATH",
    help="Folder of the run; that of an ended run continues it.  [default: runs/<run id>]",
)
@click.option(
    "--template",
    metavar="NAME|PATH",
    help="Template of the batch script.  [default: ddp, or cpu without GPUs]",
)
@click.option("--time", metavar="TIME", help="Time limit: minutes, HH:MM:SS, D-HH:MM:SS, …")
@click.option(
    "--signal-lead",
    type=int,
    metavar="S",
    help="Seconds before the time limit at which the ranks save.  [default: 120, or a third of the limit]",
)
@click.option(
    "--max-failures",
    type=int,
    metavar="N",
    help="Crashes in a row, with no new checkpoint between them, that end the run.  [default: 3]",
)
@click.option("--partition", help="Slurm partition.")
@click.option("--account", help="Account that is charged.")
@click.option("--qos", help="Quality of service.")
@click.option("--constraint", help="Features that the nodes must have.")
@click.option("--exclude", metavar="NODES", help="Nodes not to take.")
@click.option("--dependency", help="Jobs to wait for, in Slurm's notation, such as afterok:123.")
@click.option("--mem", metavar="SIZE", help="Memory of each node, such as 64G.")
@click.option(
    "--sbatch",
    multiple=True,
    callback=_directives,
    metavar="KEY=VALUE",
    help="Any other option of sbatch; may be repeated.",
)
@click.option(
    "--env",
    multiple=True,
    callback=_pairs,
    metavar="KEY=VALUE",
    help="A variable for the ranks; may be repeated.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the batch script that would be submitted, and do nothing."
)
@click.option(
    "--follow", is_flag=True, help="Stream rank 0's log until the run has ended; Ctrl-C only stops looking."
)
@json_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str, args: tuple[str, ...], dry_run: bool, follow: bool, as_json: bool, **options: Any
) -> None:
    """Submit SCRIPT as a run; ARGS reach it untouched."""
    if dry_run and as_json:
        raise click.UsageError(
            "--dry-run prints a shell script and --json a JSON document: give one of them."
        )
    given = {name: value for name, value in options.items() if value is not None}
    submission = prepare(
        script,
        args,
        given,  # type: ignore[arg-type]  # click's options are named as the fields of SubmitOptions
        environ=os.environ,
        cwd=Path.cwd(),
        python=sys.executable,
    )
    for note in submission.notes:
        click.echo(note, err=True)
    if dry_run:
        click.echo(submission.script, nl=False)
        return
    from hpctrain.jobs.submit import hand_over

    run = hand_over(submission)
    run_dir = submission.spec.run_dir
    if as_json:
        echo_json(
            {
                "run_id": run.run_id,
                "job_id": run.job_id,
                "run_dir": run_dir,
                "backend": submission.backend.name,
            }
        )
    else:
        click.echo(
            f"Run {run.run_id}: job {run.job_id} ({submission.backend.name}), folder {short_path(run_dir)}",
            err=follow,
        )
    if follow:
        from hpctrain.cli.stream import stream

        stream(run, whole=True, text_to_stderr=as_json)
    elif not as_json:
        handle = handle_of(run_dir)
        click.echo(
            f"Next: {program()} logs -f {handle}  |  {program()} status {handle}  |  "
            f"{program()} cancel {handle}"
        )
