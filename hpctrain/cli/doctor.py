"""Check the Slurm site and this machine (`hpctrain doctor`)."""

from __future__ import annotations

import os
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import echo_json, json_option, runs_dir_option
from hpctrain.text import pluralize

if TYPE_CHECKING:
    from hpctrain.jobs.doctor.probe import DoctorReport

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command("doctor")
@runs_dir_option
@click.option(
    "--write",
    "profile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the findings to FILE as a site profile, which later submissions use.",
)
@json_option
def command(runs_dir: Path, profile: Path | None, as_json: bool) -> None:
    """Check this site and this machine for problems that affect runs, and print how to fix them.

    The only change is a temporary folder in the parent folder of the runs, which is removed afterwards.
    Exits with 1 if a problem prevents jobs from running.
    """
    from hpctrain.jobs.doctor.run_checks import run_checks
    from hpctrain.jobs.doctor.site_profile import profile_options, write_profile_file
    from hpctrain.jobs.options.resolved_options import resolve_options

    site = resolve_options({}, cwd=Path.cwd(), environ=os.environ).habits
    report = run_checks(os.environ, runs_dir.absolute(), site)
    if as_json:
        echo_json(
            {
                "findings": [asdict(finding) for finding in report.findings],
                "problems": len(report.problems),
                "profile": profile_options(report) if report.site else None,
            }
        )
    else:
        _show(report)
    if profile is not None:
        write_profile_file(report, profile)
        click.echo(f"Site profile written to {profile}", err=True)
    if report.problems:
        raise SystemExit(1)


def _show(report: DoctorReport) -> None:
    width = max(len(finding.name) for finding in report.findings)
    for topic, findings in groupby(report.findings, lambda finding: finding.topic):
        click.secho(topic, bold=True)
        for finding in findings:
            standing = click.style(f"{finding.standing:<7}", fg=_COLORS[finding.standing])
            click.echo(f"  {standing}  {finding.name:<{width}}  {finding.value}")
            if finding.mend:
                click.echo(f"  {'':<7}  {'':<{width}}  → {finding.mend}")
    notes = sum(finding.standing == "note" for finding in report.findings)
    counts = [pluralize(len(report.problems), "problem") if report.problems else "No problems"]
    if notes:
        counts.append(pluralize(notes, "note"))
    click.echo(f"\n{', '.join(counts)}.")
