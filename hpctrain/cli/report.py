"""`hpctrain report`: show a run on one page, or compare several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import complete_runs, json_option, json_text, open_run, runs_dir_option, short_path
from hpctrain.errors import RunNotFound, UserError
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
    as_json = as_json or _has_json_suffix(output)
    facts = [one for run in runs for one in read_runs(run, runs_dir)]
    text = _render(facts, as_json=as_json)
    if output is None:
        output = Path("-") if as_json else _default_output(runs, facts)
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


def _has_json_suffix(output: Path | None) -> bool:
    suffix = "" if output is None else output.suffix.lower()
    if suffix not in ("", ".htm", ".html", ".json"):
        raise UserError(
            f"{output} (--output) ends in {suffix}, which is not a report format. Use .html or .json."
        )
    return suffix == ".json"


def _default_output(runs: Sequence[str], facts: list[RunData]) -> Path:
    folder = RunDir(Path(facts[0].folder))
    if len(facts) == 1:
        return folder.report
    if len(runs) == 1 and folder.array is not None:
        return folder.array.report
    raise UserError(f"Comparing {len(facts)} runs requires an output file, such as --output comparison.html.")


def _render(facts: list[RunData], *, as_json: bool) -> str:
    several = len(facts) > 1
    if as_json:
        from hpctrain.telemetry.report.json_report import json_report

        documents = [json_report(one) for one in facts]
        return json_text(documents if several else documents[0], default=str) + "\n"
    if several:
        from hpctrain.telemetry.report.comparison_page import render_comparison

        return render_comparison(facts)
    from hpctrain.telemetry.report.run_page import render_run_page

    return render_run_page(facts[0])


def read_runs(name: str, runs_dir: Path) -> list[RunData]:
    """Return the data of a run, or of each task of a job array.

    Raises:
        RunNotFound: there is no such run, and no folder of that name contains run records.
    """
    from hpctrain.telemetry.report.run_data import RunContext, read_run_data

    now = time.time()
    try:
        found = open_run(name, runs_dir)
    except RunNotFound:
        # A run started without a submission, or an incomplete folder.
        for folder in (RunDir((runs_dir / name).absolute()), RunDir(Path(name).absolute())):
            if folder.events.is_file() or folder.metrics.is_file():
                return [read_run_data(folder, RunContext(), now=now)]
        raise
    from hpctrain.cli.resubmit_command import resubmit_command
    from hpctrain.errors import HpctrainError
    from hpctrain.jobs.runs.run import query_statuses
    from hpctrain.redaction import redact_spec
    from hpctrain.telemetry.report.artifacts import read_spec

    if read_spec(found.dir.spec).get("supervised") is False:
        raise UserError(
            f"Run {found.run_id} ran without hpctrain in the job (--template plain), so it has no records "
            f"for a report. Its logs: hpctrain logs {found.run_id}"
        )
    runs = found.tasks() or [found]
    told = []
    try:
        known = query_statuses(runs, skip_unreadable=True)
    except (HpctrainError, OSError):
        known = []
    for place, run in enumerate(runs):
        command = resubmit_command(redact_spec(read_spec(run.dir.spec)))
        state = RunContext(resubmit_command=command)
        if place < len(known):
            state = RunContext(str(known[place].state), known[place].words, known[place].cause, command)
        run_data = read_run_data(run.dir, state, now=now)
        told.append(run_data)
    return told
