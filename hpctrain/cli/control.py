"""Control runs: `hpctrain wait`, `cancel`, `requeue`, `profile` and `chaos`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import (
    describe_end,
    echo_documents,
    echo_json,
    echo_log,
    exit_for,
    json_option,
    one_line,
    run_argument,
    runs_argument,
    short_path,
)
from hpctrain.cluster import expand_hostlist
from hpctrain.errors import UserError
from hpctrain.slurm.states import RunState
from hpctrain.text import format_count, format_duration

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run
    from hpctrain.jobs.runs.run_status import RunStatus


@click.command("wait")
@runs_argument
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="S", help="Maximum time to wait, in seconds."
)
@click.option(
    "--unknown-limit",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Maximum time to wait while the state of RUN is unknown and RUN writes nothing, in seconds.  "
    "[default: 3600]",
)
@json_option
def wait_command(runs: list[Run], timeout: float | None, unknown_limit: float | None, as_json: bool) -> None:
    """Wait until every RUN ends. Exits with 0 if all completed, 4 if not, and 1 after --timeout.

    Exits with 3 if the state of RUN is unknown for longer than --unknown-limit.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    statuses: list[RunStatus] = []
    for run in runs:
        remaining_s = timeout if deadline is None or not statuses else max(0.0, deadline - time.monotonic())
        status = run.wait_for_end(remaining_s, unknown_limit, report=partial(click.echo, err=True))
        statuses.append(status)
        if not as_json:
            echo_log(describe_end(status))
    if as_json:
        echo_documents([asdict(status) for status in statuses])
    for status in statuses:
        exit_for(status)


@click.command("cancel")
@runs_argument
@json_option
def cancel_command(runs: list[Run], as_json: bool) -> None:
    """Cancel every RUN after saving its state. Does nothing to runs that have already finished."""
    documents = []
    for run in runs:
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


@click.command("requeue")
@run_argument
@json_option
def requeue_command(run: Run, as_json: bool) -> None:
    """Save the state of the active RUN and continue it in a new attempt, as after a preemption.

    If RUN has already been requeued, end Slurm's two-minute delay for requeued jobs.
    """
    before = run.requeue()
    if as_json:
        echo_json({"run_id": run.run_id, "job_id": before.job_id, "requeued": True})
    elif before.state is RunState.PENDING:
        click.echo(
            f"Ended Slurm's requeue delay for run {run.run_id}. The run starts when nodes are available."
        )
    else:
        click.echo(
            f"Requeueing run {run.run_id}. The script saves a checkpoint first, if it can. The run then "
            "continues in a new attempt."
        )


@click.command("chaos")
@run_argument
@click.option(
    "--fault",
    "names",
    multiple=True,
    metavar="FAULT",
    help="Fault to inject: kill-rank, kill-node-ranks, stop-rank or preempt. With Slurm, also "
    "kill-supervisor or requeue. Repeatable.  [default: all except stop-rank]",
)
@click.option("--times", type=click.IntRange(min=1), default=1, help="Number of faults.")
@click.option(
    "--every",
    type=click.FloatRange(min=0),
    default=60.0,
    metavar="SECONDS",
    help="Mean time between faults. Each interval varies by up to 50%.",
)
@click.option("--seed", type=int, help="Random seed. The same seed produces the same faults.")
@click.option("--dry-run", is_flag=True, help="Print the faults without injecting them.")
@json_option
def chaos_command(
    run: Run, names: tuple[str, ...], times: int, every: float, seed: int | None, dry_run: bool, as_json: bool
) -> None:
    """Inject faults into RUN at random times, to check that it recovers.

    RUN must be running and belong to you.
    """
    from hpctrain.jobs.runs.chaos import ChaosRunner, Fault, check_disturbable, faults_for

    if unknown := sorted(set(names).difference(Fault)):
        raise click.UsageError(f"Unknown --fault {', '.join(unknown)}. Valid faults: {', '.join(Fault)}.")
    backend = check_disturbable(run).backend
    is_batch = run.dir.is_batch
    faults = faults_for(backend, [Fault(name) for name in names], is_batch=is_batch)
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    report = partial(click.echo, err=as_json)
    report(f"Faults for run {run.run_id}: {', '.join(faults)} (--seed {seed})")
    num_faults = ChaosRunner(run, faults, seed, report).inject_faults(times, every, dry_run=dry_run)
    if as_json:
        echo_json({"run_id": run.run_id, "faults": 0 if dry_run else num_faults, "seed": seed})
    elif num_faults < times:
        click.echo(f"Run {run.run_id} ended after {num_faults} of {times} faults.")


def _rank_list(_context: click.Context, _param: click.Parameter, text: str) -> list[int]:
    try:
        return sorted({int(number) for number in expand_hostlist(f"[{text}]".replace(" ", ""))})
    except (UserError, ValueError):
        raise click.BadParameter(f"{text!r} is not a valid list of ranks. Use the form 0,3 or 0-7.") from None


@click.command("profile")
@run_argument
@click.option(
    "--ranks", callback=_rank_list, default="0", metavar="R,…", help="Ranks to profile, such as 0,3 or 0-7."
)
@click.option("--steps", type=click.IntRange(min=1), default=5, help="Number of optimizer steps to profile.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=600.0,
    metavar="S",
    help="Maximum time to wait for the ranks, in seconds.",
)
@json_option
def profile_command(run: Run, ranks: list[int], steps: int, timeout: float, as_json: bool) -> None:
    """Profile the next optimizer steps of RUN with torch.profiler. RUN must be running and belong to you.

    Writes a trace per rank to the run folder, and prints the most expensive operators. The run is not
    restarted, and its results do not change.
    """
    from hpctrain.jobs.runs.profile import ProfileRequest

    request = ProfileRequest.submit(run, ranks, steps)
    results = request.wait(timeout, partial(click.echo, err=True))
    if as_json:
        echo_json({"run_id": run.run_id, "ranks": results})
    else:
        for result in results:
            _print_profile(result)
    if any("error" in result for result in results):
        sys.exit(1)


def _print_profile(result: Mapping[str, Any]) -> None:
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
