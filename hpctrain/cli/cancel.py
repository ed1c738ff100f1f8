"""End runs permanently (`hpctrain cancel`)."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import echo_documents, json_option, open_run, runs_argument
from hpctrain.errors import RunNotFound


@click.command("cancel")
@runs_argument
@json_option
def command(runs: tuple[str, ...], runs_dir: Path, as_json: bool) -> None:
    """Cancel every RUN after saving its state. Does nothing to runs that have already finished."""
    from hpctrain.slurm.states import RunState

    try:
        opened = [open_run(name, runs_dir) for name in runs]
    except RunNotFound as error:
        raise RunNotFound(f"{error} No run was cancelled." if len(runs) > 1 else str(error)) from error
    documents = []
    for run in opened:
        before = run.cancel()
        documents.append({"run_id": run.run_id, "job_id": before.job_id, "cancelled": not before.state.ended})
        if as_json:
            continue
        if before.state.ended:
            click.echo(f"Run {run.run_id} has already finished ({before.state}).")
        elif before.state is RunState.PENDING:
            click.echo(f"Cancelled run {run.run_id} before it started.")
        else:
            limit = "Slurm's KillWait time" if before.backend == "slurm" else "a minute"
            click.echo(
                f"Cancelling run {run.run_id}. The script saves a checkpoint first, if it can. The run ends "
                f"within {limit}."
            )
    if as_json:
        echo_documents(documents)
