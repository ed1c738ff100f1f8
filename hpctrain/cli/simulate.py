"""`hpctrain simulate`: what becomes of many runs on many GPUs, by the rules of the supervisor."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from hpctrain.cli.common import echo_json, json_option


@click.command("simulate")
@click.option("--gpus", default=10_000, show_default=True, help="GPUs of the cluster.")
@click.option("--gpus-per-node", default=8, show_default=True, help="GPUs of a node.")
@click.option("--days", default=30.0, show_default=True, help="Days that pass.")
@click.option("--node-mtbf", default=50.0, show_default=True, help="Days between two faults of a good node.")
@click.option(
    "--bad-nodes", default=0.01, show_default=True, help="Share of nodes that fail 100 times as often."
)
@click.option("--preemptions", default=0.5, show_default=True, help="How often a run is preempted in a day.")
@click.option("--seed", default=1, show_default=True, help="Of the random numbers.")
@json_option
def command(
    gpus: int,
    gpus_per_node: int,
    days: float,
    node_mtbf: float,
    bad_nodes: float,
    preemptions: float,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate runs with random faults on a cluster, and show what the supervisor's rules make of them.

    What follows on a fault is decided by the same function as in a real run; cluster and faults are a model.
    """
    from hpctrain.supervisor.simulation import Conditions, Simulation

    if gpus < gpus_per_node or gpus_per_node < 1 or min(days, node_mtbf, preemptions) <= 0:
        raise click.UsageError("Give at least one node, and more than 0 days, faults and preemptions.")
    if not 0 <= bad_nodes <= 1:
        raise click.UsageError(f"--bad-nodes is {bad_nodes}, but a share is from 0 to 1.")
    conditions = Conditions(
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        days=days,
        node_mtbf_days=node_mtbf,
        bad_nodes=bad_nodes,
        preemptions_per_day=preemptions,
        seed=seed,
    )
    report = Simulation(conditions).run()
    reasons = Counter(str(run.why).partition(": ")[2] or str(run.why) for run in report.runs if run.why)
    if as_json:
        echo_json(
            {
                "conditions": asdict(conditions),
                "runs": report.states(),
                "ends": report.ends,
                "actions": report.actions,
                "failed": reasons,
                "most_starts_without_progress": report.most_starts_without_progress,
                "trained_node_days": report.trained_s / 86_400,
                "lost_node_days": report.lost_s / 86_400,
            }
        )
        return
    states = report.states()
    click.echo(f"{len(report.runs)} runs on {conditions.num_nodes} nodes, {days:g} days")
    click.echo("runs     " + _counted(states))
    click.echo("ends     " + _counted(report.ends))
    click.echo("actions  " + _counted(report.actions))
    total = report.trained_s + report.lost_s
    click.echo(
        f"lost     {100 * report.lost_s / total if total else 0:.2f} % of the nodes' time, to restarts"
    )
    click.echo(
        f"starts   {report.most_starts_without_progress} at most without a new checkpoint between them"
    )
    for reason, count in reasons.most_common(5):
        click.echo(f"failed   {count} × {reason}")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
