"""`hpctrain chaos`: disturb a running run, to see what becomes of it."""

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
    help="What may happen: kill-rank, kill-node-ranks, stop-rank, preempt, and under Slurm kill-supervisor "
    "and requeue. May be repeated.  [default: any but stop-rank]",
)
@click.option("--times", type=click.IntRange(min=1), default=1, show_default=True, help="How often.")
@click.option(
    "--every",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two faults on the average; half as much at the least.",
)
@click.option("--seed", type=int, help="Of the random numbers; the same ones come again with it.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
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
    """Disturb RUN, which is running and yours, as faults do at random moments. It should end all the same."""
    from hpctrain.jobs.chaos import Chaos, Fault, check_run, faults_for

    if unknown := sorted(set(names).difference(Fault)):
        raise click.UsageError(f"--fault {', '.join(unknown)}: there are {', '.join(Fault)}.")
    found = open_run(run, runs_dir)
    status = check_run(found)
    faults = faults_for(status.backend, [Fault(name) for name in names])
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    tell = partial(click.echo, err=as_json)
    tell(f"Run {found.run_id}: {', '.join(faults)}; --seed {seed}")
    done = Chaos(found, faults, seed, tell).go_on(times, every, dry_run=dry_run)
    if as_json:
        echo_json({"run_id": found.run_id, "faults": 0 if dry_run else done, "seed": seed})
    elif done < times:
        click.echo(f"Run {found.run_id} has ended after {done} of {times} faults.")
