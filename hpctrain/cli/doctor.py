"""`hpctrain doctor`: a look at the Slurm site and at this machine."""

from __future__ import annotations

import os
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import echo_json, json_option, runs_dir_option

if TYPE_CHECKING:
    from hpctrain.jobs.doctor.examine import Report

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command("doctor")
@runs_dir_option
@click.option(
    "--write",
    "profile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what was found as the site's profile, which submissions read.",
)
@json_option
def command(runs_dir: Path, profile: Path | None, as_json: bool) -> None:
    """Look for what will hold runs up, at this site and on this machine, and say what to do about it.

    Nothing is changed; only in the folder of the runs a temporary folder is made, and removed again. Exit
    code 1 says that a problem will stop jobs.
    """
    from hpctrain.jobs.config import resolve
    from hpctrain.jobs.doctor.examine import examine
    from hpctrain.jobs.doctor.write import write

    known = resolve({}, cwd=Path.cwd(), environ=os.environ).site
    report = examine(os.environ, runs_dir.absolute(), known)
    if as_json:
        echo_json(_document(report))
    else:
        _show(report)
    if profile is not None:
        write(report, profile)
        click.echo(f"The site's profile is written: {profile}", err=True)
    if report.problems:
        raise SystemExit(1)


def _document(report: Report) -> dict[str, object]:
    from hpctrain.jobs.doctor.write import as_options

    return {
        "findings": [asdict(finding) for finding in report.findings],
        "problems": len(report.problems),
        "profile": as_options(report) if report.site else None,
    }


def _show(report: Report) -> None:
    width = max(len(finding.name) for finding in report.findings)
    for topic, findings in groupby(report.findings, lambda finding: finding.topic):
        click.secho(topic, bold=True)
        for finding in findings:
            standing = click.style(f"{finding.standing:<7}", fg=_COLORS[finding.standing])
            click.echo(f"  {standing}  {finding.name:<{width}}  {finding.value}")
            if finding.mend:
                click.echo(f"  {'':<7}  {'':<{width}}  → {finding.mend}")
    notes = sum(finding.standing == "note" for finding in report.findings)
    counts = [
        f"{number} {noun}{'' if number == 1 else 's'}"
        for number, noun in ((len(report.problems), "problem"), (notes, "note"))
        if number
    ]
    click.echo(f"\n{', '.join(counts) or 'All is well'}.")
