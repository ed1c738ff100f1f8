"""Train steps of a run again, and compare them with its record (`hpctrain verify`)."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

import click

from hpctrain.cli.common import echo_json, json_option, run_argument
from hpctrain.errors import RunFailed
from hpctrain.text import printable

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run

_RANGE = re.compile(r"(\d{1,18})?:(\d{1,18})?", re.ASCII)
_EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@click.command("verify")
@run_argument
@click.option("--steps", metavar="A:B", help="Steps to verify, such as 1:100 or 101:.  [default: all]")
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N", help="Number of ranks.  [default: as in RUN]"
)
@click.option(
    "--backend",
    type=click.Choice(["local", "slurm"]),
    default="local",
    help="Train on this machine, or in a job with the Slurm options of RUN.",
)
@click.option("--ignore", "ignored", multiple=True, metavar="METRIC", help="Metric to skip. Repeatable.")
@click.option(
    "--scratch-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="Parent of the folder for the repeated steps.  [default: the folder for temporary files, or the "
    "parent folder of RUN with --backend slurm]",
)
@json_option
def command(
    run: Run,
    steps: str | None,
    ranks: int | None,
    backend: Literal["local", "slurm"],
    ignored: tuple[str, ...],
    scratch_dir: Path | None,
    as_json: bool,
) -> None:
    """Train steps of RUN again, and compare losses, samples and state with its record.

    Training starts from the checkpoint before the first step, or from the beginning. It uses the code
    snapshot, arguments, environment and data of RUN. RUN is not changed. The exit code is 0 if everything is
    identical to the last bit, 4 if not, and 2 if there is nothing to compare.
    """
    from hpctrain.jobs.runs.run import require_single
    from hpctrain.jobs.verify.verify_run import describe_result, result_record, verify_run

    require_single(run)
    first_step, last_step = _parse_steps(steps)
    for number in _EXIT_SIGNALS:
        # `nohup` ignores SIGHUP.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)
    result = verify_run(
        run.dir,
        os.environ,
        first=first_step,
        last=last_step,
        num_ranks=ranks,
        ignored_metrics=ignored,
        backend=backend,
        parent=scratch_dir,
        report=partial(click.echo, err=True),
    )
    if as_json:
        echo_json(result_record(result))
    else:
        for line in describe_result(result):
            click.echo(printable(line))
    sys.exit(0 if result.identical else RunFailed.exit_code)


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Exit after the training is cancelled and its folder removed. Further signals do not interrupt this."""
    for exit_signal in _EXIT_SIGNALS:
        signal.signal(exit_signal, signal.SIG_IGN)
    sys.exit(128 + number)


def _parse_steps(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    if (match := _RANGE.fullmatch(text)) is None:
        raise click.UsageError(
            f"--steps is {text!r}, but must have the form A:B, such as 1:100, 101: or :100."
        )
    first_step, last_step = (int(number) if number else None for number in match.groups())
    return first_step, last_step
