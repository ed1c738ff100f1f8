"""`hpctrain simulate`: simulate many runs on many GPUs with the rules of the supervisor."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from hpctrain.cli.common import echo_json, json_option
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import REQUEUE_HOLD_S
from hpctrain.text import pluralize

_POSITIVE, _NOT_NEGATIVE = click.FloatRange(min=0, min_open=True), click.FloatRange(min=0)


@click.command("simulate")
@click.option("--gpus", default=10_000, show_default=True, help="GPUs in the cluster.")
@click.option(
    "--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True, help="GPUs per node."
)
@click.option("--days", type=_POSITIVE, default=30.0, show_default=True, help="Days to simulate.")
@click.option(
    "--node-mtbf",
    type=_POSITIVE,
    default=50.0,
    show_default=True,
    help="Mean days between failures of a good node.",
)
@click.option(
    "--bad-nodes",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Fraction of bad nodes, which fail 100 times as often as good nodes.",
)
@click.option(
    "--preemptions", type=_NOT_NEGATIVE, default=0.5, show_default=True, help="Preemptions per run per day."
)
@click.option(
    "--emergency-checkpoints", is_flag=True, help="Assume that all runs can use emergency checkpoints."
)
@click.option(
    "--copy-every",
    type=_NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    help="Seconds between copies of the state in memory (with --emergency-checkpoints). With 0, a surviving "
    "rank saves its state instead.",
)
@click.option(
    "--run-gpus", type=int, help="Simulate a single run on this number of GPUs, and show its effective time."
)
@click.option(
    "--spare-nodes",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Spare nodes of the single run.",
)
@click.option(
    "--checkpoint-every",
    type=_POSITIVE,
    default=1800.0,
    show_default=True,
    help="Seconds between checkpoints.",
)
@click.option(
    "--restart-time",
    type=_NOT_NEGATIVE,
    default=60.0,
    show_default=True,
    help="Seconds from a failure until training continues.",
)
@click.option(
    "--requeue-hold",
    type=_NOT_NEGATIVE,
    default=REQUEUE_HOLD_S,
    show_default=True,
    help="Seconds for which Slurm holds a requeued job.",
)
@click.option(
    "--max-failures",
    type=click.IntRange(min=1),
    default=JobSpec.max_failures,
    show_default=True,
    help="Number of consecutive failures, with no new checkpoint in between, that end a run.",
)
@click.option("--seed", default=1, show_default=True, help="Random seed.")
@json_option
def command(
    gpus: int,
    gpus_per_node: int,
    days: float,
    node_mtbf: float,
    bad_nodes: float,
    preemptions: float,
    emergency_checkpoints: bool,
    copy_every: float,
    run_gpus: int | None,
    spare_nodes: int,
    checkpoint_every: float,
    restart_time: float,
    requeue_hold: float,
    max_failures: int,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate runs on a cluster with random faults, and show the decisions of the supervisor.

    The same code makes the decisions in a real run. Only the cluster and the faults are simulated.
    """
    from hpctrain.forecast.restart_simulation import Simulation, SimulationConfig

    if gpus < gpus_per_node:
        raise click.UsageError(
            f"--gpus is {gpus}, but a single node has {gpus_per_node} (--gpus-per-node). Increase --gpus."
        )
    if copy_every and not emergency_checkpoints:
        raise click.UsageError("--copy-every requires --emergency-checkpoints.")
    if spare_nodes and run_gpus is None:
        raise click.UsageError("--spare-nodes requires --run-gpus.")
    most = gpus - spare_nodes * gpus_per_node
    if run_gpus is not None and not gpus_per_node <= run_gpus <= most:
        raise click.UsageError(
            f"--run-gpus is {run_gpus}, but must be between {gpus_per_node} (--gpus-per-node) and {most} "
            "(--gpus without the GPUs of --spare-nodes)."
        )
    conditions = SimulationConfig(
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        days=days,
        node_mtbf_days=node_mtbf,
        bad_nodes=bad_nodes,
        preemptions_per_day=preemptions,
        save_every_s=checkpoint_every,
        emergency_checkpoints=emergency_checkpoints,
        copy_every_s=copy_every,
        run_gpus=run_gpus,
        spare_nodes=spare_nodes,
        max_failures=max_failures,
        restart_s=restart_time,
        requeue_hold_s=requeue_hold,
        seed=seed,
    )
    report = Simulation(conditions).run()
    reasons = Counter(
        str(run.reason).partition(": ")[2] or str(run.reason) for run in report.runs if run.reason
    )
    if as_json:
        echo_json(
            {
                "conditions": asdict(conditions),
                "runs": report.states(),
                "ends": report.ends,
                "actions": report.actions,
                "emergency_checkpoints": report.emergency_checkpoints,
                "failed": reasons,
                "most_starts_without_progress": report.most_starts_without_progress,
                "trained_node_days": report.trained_s / 86_400,
                "lost_node_days": report.lost_s / 86_400,
                "effective_training_time_ratio": report.effective,
            }
        )
        return
    states = report.states()
    click.echo(f"{pluralize(len(report.runs), 'run')} on {conditions.num_nodes} nodes, {days:g} days")
    words = {"trains": "training", "waits": "waiting"}
    click.echo("runs     " + _counted(Counter({words.get(name, name): n for name, n in states.items()})))
    click.echo("ends     " + _counted(report.ends))
    click.echo("actions  " + _counted(report.actions))
    if emergency_checkpoints:
        source = f"copies every {copy_every:g} s" if copy_every else "surviving ranks"
        saved = pluralize(report.emergency_checkpoints, "emergency checkpoint")
        click.echo(f"memory   {saved} from {source}")
    total = report.trained_s + report.lost_s
    click.echo(f"lost     {100 * report.lost_s / total if total else 0:.2f}% of node time due to restarts")
    if report.effective is not None:
        click.echo(f"effective {100 * report.effective:.1f}% of the wall time")
    attempts = pluralize(report.most_starts_without_progress, "consecutive attempt")
    click.echo(f"progress at most {attempts} without a new checkpoint")
    for reason, count in reasons.most_common(5):
        click.echo(f"failed   {count} × {reason}")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
