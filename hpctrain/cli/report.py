"""`hpctrain report`: a run in one page, or several side by side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import json_text, open_run, runs_dir_option, short_path
from hpctrain.errors import RunNotFound, UserError
from hpctrain.files import write_atomic
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.telemetry.report.facts import Facts

_FORMATS = ("html", "md", "json")


@click.command("report")
@click.argument("runs", metavar="RUN [RUN …]", nargs=-1, required=True)
@runs_dir_option
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    help="html, one page that needs nothing else; md; or json. [default: html, or what FILE ends in]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write; - is standard output. [default: report.html in the run folder; - for md and json]",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(
    runs: tuple[str, ...], runs_dir: Path, form: str | None, output: Path | None, as_json: bool
) -> None:
    """Tell of RUN in one page: loss, restarts, what happened when, where the time went, how to run it again.

    RUN may go on, have no metrics yet, or be damaged: what is there is told. Several runs, or the tasks of a
    job array, are compared.
    """
    form = "json" if as_json else form or _form_of(output)
    facts = [one for run in runs for one in read_runs(run, runs_dir)]
    text = _render(facts, form)
    if output is None:
        output = _default_output(facts) if form == "html" else Path("-")
    if str(output) == "-":
        click.echo(text, nl=not text.endswith("\n"))
        return
    try:
        write_atomic(output, text, durable=False)
    except OSError as error:
        raise UserError(f"The report cannot be written to {output} (--output): {error.strerror}.") from error
    click.echo(f"The report is written: {short_path(output)}")


def _form_of(output: Path | None) -> str:
    suffix = output.suffix[1:].lower() if output is not None else ""
    if suffix in ("", "htm", *_FORMATS):
        return suffix if suffix in _FORMATS else "html"
    raise UserError(
        f"{output} (--output) ends in .{suffix}, which is no format of a report. Let it end in .html, .md or "
        ".json, or say --format."
    )


def _default_output(facts: list[Facts]) -> Path:
    if len(facts) == 1:
        return RunDir(Path(facts[0].folder)).report
    raise UserError(
        f"There are {len(facts)} runs to compare, those of a job array among them, and the page lies in the "
        "folder of none. Say where to write it: --output comparison.html."
    )


def _render(facts: list[Facts], form: str) -> str:
    several = len(facts) > 1
    if form == "json":
        documents = [one.document() for one in facts]
        return json_text(documents if several else documents[0], default=str) + "\n"
    if form == "md":
        from hpctrain.telemetry.report.markdown import comparison_text, report_text

        return comparison_text(facts) if several else report_text(facts[0])
    if several:
        from hpctrain.telemetry.report.comparison import render_comparison

        return render_comparison(facts)
    from hpctrain.telemetry.report.page import render_report

    return render_report(facts[0])


def read_runs(name: str, runs_dir: Path) -> list[Facts]:
    """What there is to tell of a run; of a job array, of each of its tasks.

    Raises:
        RunNotFound: there is no such run, and no folder of that name holds a record of one.
    """
    from hpctrain.telemetry.report.facts import State, read_facts

    now = time.time()
    try:
        found = open_run(name, runs_dir)
    except RunNotFound:
        # A training that nobody submitted, or a folder of which only a part is left.
        for folder in (RunDir((runs_dir / name).absolute()), RunDir(Path(name).absolute())):
            if folder.events.is_file() or folder.metrics.is_file():
                return [read_facts(folder, State(), now=now)]
        raise
    from hpctrain.cli.again import command_again
    from hpctrain.errors import HpctrainError
    from hpctrain.jobs.runs import statuses

    runs = found.tasks() or [found]
    told = []
    try:
        known = statuses(runs)
    except (HpctrainError, OSError):
        known = []
    for place, run in enumerate(runs):
        state = State()
        if place < len(known):
            state = State(str(known[place].state), known[place].words, known[place].cause)
        facts = read_facts(run.dir, state, now=now)
        facts.again = command_again(facts.spec)
        told.append(facts)
    return told
