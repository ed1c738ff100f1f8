"""Profile some steps of an active run (`hpctrain profile`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.common import echo_json, json_option, one_line, open_run, run_argument, short_path
from hpctrain.cluster import expand_hostlist
from hpctrain.errors import UserError
from hpctrain.text import format_count, format_duration


class _RankList(click.ParamType[tuple[int, ...]]):
    """Ranks and ranges of ranks, such as `0,3` or `0-7`."""

    name = "R,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        try:
            return tuple(sorted(set(map(int, expand_hostlist(f"[{value}]".replace(" ", ""))))))
        except (UserError, ValueError):
            self.fail(f"{value!r} is not a valid list of ranks. Use the form 0,3 or 0-7.", param, ctx)


@click.command("profile")
@run_argument
@click.option(
    "--ranks", type=_RankList(), default="0", show_default=True, help="Ranks to profile, such as 0,3 or 0-7."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of optimizer steps to profile.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Maximum time to wait for the ranks, in seconds.",
)
@json_option
def command(
    run: str, runs_dir: Path, ranks: tuple[int, ...], steps: int, timeout: float, as_json: bool
) -> None:
    """Profile the next optimizer steps of RUN with torch.profiler. RUN must be running and belong to you.

    Writes a trace per rank to the run folder, and prints the most expensive operators. The run is not
    restarted, and its results do not change.
    """
    from hpctrain.jobs.runs.profile import ProfileRequest

    request = ProfileRequest.submit(open_run(run, runs_dir), ranks, steps)
    results = request.wait(timeout, partial(click.echo, err=True))
    if as_json:
        echo_json({"run_id": request.run.run_id, "ranks": results})
    else:
        for result in results:
            _print_result(result)
    if any("error" in result for result in results):
        sys.exit(1)


def _print_result(result: Mapping[str, Any]) -> None:
    if "error" in result:
        click.echo(f"rank {result['rank']}: {one_line(result['error'])}", err=True)
        return
    steps = f"steps {result['first_step']}-{result['last_step']} of the attempt"
    click.echo(f"rank {result['rank']}: {steps}, {format_duration(result['seconds'])}")
    click.echo(f"trace  {short_path(result['trace'])}")
    # Times of an operator exclude those that it calls.
    click.echo(f"  {'CPU time':>10} {'GPU time':>10} {'calls':>7}  operator")
    for operator in result["operators"]:
        times = f"{format_duration(operator['cpu_s']):>10} {format_duration(operator['gpu_s']):>10}"
        click.echo(f"  {times} {format_count(operator['calls']):>7}  {one_line(operator['name'])[:60]}")
