"""Write a page about a run, or a comparison of several (`hpctrain report`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import (
    complete_runs,
    json_option,
    json_text,
    open_run,
    runs_dir_option,
    short_path,
)
from hpctrain.errors import HpctrainError, RunNotFound, UserError
from hpctrain.files import write_atomic
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.telemetry.report.run_data import RunData


@click.command("report")
@click.argument("runs", metavar="RUN [RUN …]", nargs=-1, required=True, shell_complete=complete_runs)
@runs_dir_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Output file, or - for standard output.  [default: report.html in the folder of the run or job "
    "array; - with --json]",
)
@json_option
def command(runs: tuple[str, ...], runs_dir: Path, output: Path | None, as_json: bool) -> None:
    """Generate a one-page report of RUN: loss, restarts, timeline, time breakdown, and how to reproduce it.

    RUN may be active, damaged or without metrics; the report then shows the available data. Several runs, or
    the tasks of a job array, are compared.
    """
    suffix = "" if output is None else output.suffix.lower()
    if suffix not in ("", ".htm", ".html", ".json"):
        raise UserError(
            f"{output} (--output) ends in {suffix}, which is not a report format. Use .html or .json."
        )
    as_json = as_json or suffix == ".json"
    run_data = [task for run in runs for task in read_runs(run, runs_dir)]
    text = _render(run_data, as_json=as_json)
    if output is None:
        output = Path("-") if as_json else _default_output(runs, run_data)
    if str(output) == "-":
        click.echo(text, nl=not text.endswith("\n"))
        return
    try:
        write_atomic(output, text.encode(errors="backslashreplace"), durable=False)
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {output} (--output): {error.strerror}. Choose another file."
        ) from error
    click.echo(f"Report written to {short_path(output)}")


def _default_output(runs: Sequence[str], run_data: list[RunData]) -> Path:
    folder = RunDir(Path(run_data[0].folder))
    if len(run_data) == 1:
        return folder.report
    if len(runs) == 1 and folder.array is not None:
        return folder.array.report
    raise UserError(
        f"Comparing {len(run_data)} runs requires an output file, such as --output comparison.html."
    )


def _render(run_data: list[RunData], *, as_json: bool) -> str:
    from hpctrain.telemetry.report.pages import render_comparison, render_run_page

    if as_json:
        documents = [json_report(run) for run in run_data]
        return json_text(documents if len(documents) > 1 else documents[0], default=str) + "\n"
    return render_comparison(run_data) if len(run_data) > 1 else render_run_page(run_data[0])


def json_report(run_data: RunData) -> dict[str, Any]:
    from msgspec import to_builtins

    from hpctrain.telemetry.report.advice import advise

    breakdown, curves, devices = run_data.breakdown, run_data.curves, run_data.devices
    lowest = curves.lowest("loss")
    fields = (
        *("run_id", "folder", "state", "cause", "start", "end", "reports_steps", "step", "steps_per_s"),
        *("hparams", "environment", "spec", "notes"),
    )
    return {
        **{name: getattr(run_data, name) for name in fields},
        "wall_us": breakdown.wall_us,
        "loss": curves.last("loss"),
        "loss_is_no_number_since": curves.no_number_since("loss"),
        "best": run_data.best and asdict(run_data.best),
        "lowest_loss": lowest and {"step": lowest[0], "loss": lowest[1]},
        "last": {name: curves.last(name) for name in curves.names},
        "lost_steps": breakdown.lost_steps,
        "ledger": [
            {
                "what": category.value,
                "us": us if (measured := category in breakdown.measured) else None,
                "measured": measured,
            }
            for category, us in breakdown.totals_us.items()
        ],
        **asdict(run_data.goodput),
        "energy": run_data.energy and asdict(run_data.energy),
        "attempts": [
            {**asdict(attempt), "interrupted": attempt.interrupted} for attempt in run_data.attempts
        ],
        "checkpoints": [asdict(checkpoint) for checkpoint in run_data.checkpoints],
        "script_checkpoints": to_builtins(run_data.script_checkpoints),
        "gpus": [{"gpu": gpu, **means} for gpu, means in zip(devices.gpus, devices.gpu_means, strict=True)],
        "nodes": [
            {**asdict(node), **means} for node, means in zip(devices.nodes, devices.node_means, strict=True)
        ],
        "advice": [asdict(advice) for advice in advise(run_data)],
        "code": [
            {"commit": code.commit, "changed": code.changed, "new_files": code.new_files}
            for code in run_data.codes
        ],
        "again": run_data.resubmit_command,
    }


def read_runs(name: str, runs_dir: Path) -> list[RunData]:
    from hpctrain.telemetry.report.run_data import RunData

    time_now = time.time()
    try:
        opened = open_run(name, runs_dir)
    except RunNotFound:
        # A run started without a submission, or an incomplete folder.
        for folder in (RunDir((runs_dir / name).absolute()), RunDir(Path(name).absolute())):
            if folder.events.is_file() or folder.metrics.is_file():
                return [RunData(folder, now=time_now)]
        raise
    from hpctrain.checkpoint.listing import list_script_checkpoints
    from hpctrain.cli.resume import resubmit_command
    from hpctrain.jobs.runs.run import query_statuses
    from hpctrain.jobs.runs.run_status import checkpoint_pattern, unmatched_pattern
    from hpctrain.jobspec.redaction import redact_spec
    from hpctrain.telemetry.report.run_results import read_spec

    if read_spec(opened.dir.spec).get("supervised") is False:
        raise UserError(
            f"Run {opened.run_id} ran without hpctrain in the job (--template plain), so it has no records "
            f"for a report. Its logs: hpctrain logs {opened.run_id}"
        )
    runs = opened.tasks() or [opened]
    try:
        statuses = query_statuses(runs, skip_unreadable=True)
    except (HpctrainError, OSError):
        statuses = []
    run_data = []
    for run, status in zip_longest(runs, statuses):
        command = resubmit_command(redact_spec(read_spec(run.dir.spec)))
        facts = () if status is None else (str(status.state), status.words, status.cause)
        saved = list_script_checkpoints(run.dir.checkpoints, checkpoint_pattern(run.dir))
        data = RunData(run.dir, *facts, now=time_now, resubmit_command=command, script_checkpoints=saved)
        if data.attempts and (problem := unmatched_pattern(run.dir)):
            data.notes.append(f"{problem[0].upper()}{problem[1:]}.")
        run_data.append(data)
    return run_data
