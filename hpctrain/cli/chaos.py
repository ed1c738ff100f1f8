"""Inject faults into an active run (`hpctrain chaos`)."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import click

from hpctrain.cli.common import echo_json, json_option, open_run, run_argument


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
@click.option("--times", type=click.IntRange(min=1), default=1, show_default=True, help="Number of faults.")
@click.option(
    "--every",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Mean time between faults. Each interval varies by up to 50%.",
)
@click.option("--seed", type=int, help="Random seed. The same seed produces the same faults.")
@click.option("--dry-run", is_flag=True, help="Print the faults without injecting them.")
@json_option
def command(
    run: str,
    runs_dir: Path,
    names: tuple[str, ...],
    times: int,
    every: float,
    seed: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Inject faults into RUN at random times, to check that it recovers.

    RUN must be running and belong to you.
    """
    from hpctrain.jobs.runs.chaos import ChaosRunner, Fault, check_disturbable, faults_for

    if unknown := sorted(set(names).difference(Fault)):
        raise click.UsageError(f"Unknown --fault {', '.join(unknown)}. Valid faults: {', '.join(Fault)}.")
    opened = open_run(run, runs_dir)
    status = check_disturbable(opened)
    faults = faults_for(status.backend, [Fault(name) for name in names])
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    report = partial(click.echo, err=as_json)
    report(f"Faults for run {opened.run_id}: {', '.join(faults)} (--seed {seed})")
    num_faults = ChaosRunner(opened, faults, seed, report).inject_faults(times, every, dry_run=dry_run)
    if as_json:
        echo_json({"run_id": opened.run_id, "faults": 0 if dry_run else num_faults, "seed": seed})
    elif num_faults < times:
        click.echo(f"Run {opened.run_id} ended after {num_faults} of {times} faults.")
