"""`hpctrain setup`: check a cluster, and install hpctrain there."""

from __future__ import annotations

import click

from hpctrain._version import __version__
from hpctrain.cli.on_cluster import needed_cluster
from hpctrain.errors import UserError


@click.command("setup")
@click.option(
    "--folder",
    metavar="DIR",
    help="Project folder on the cluster, such as '$SCRATCH/project'.  [default: ~/hpctrain/NAME, where NAME "
    "is the name of the local project folder]",
)
@click.option(
    "--python",
    metavar="PATH",
    help="Python on the cluster for hpctrain and the ranks. '' restores the default.  [default: an "
    "environment created by `setup`]",
)
@click.pass_context
def command(ctx: click.Context, folder: str | None, python: str | None) -> None:
    """Check a cluster (--on), and install hpctrain there if it is missing or has another version.

    Without --python, hpctrain is installed into a new environment, which also contains the packages of the
    cluster's python3. Later commands use the same folder and Python.
    """
    from hpctrain.remote.environment_check import collect_facts, find_problems, is_supported
    from hpctrain.remote.install import install_hpctrain

    cluster = needed_cluster(ctx)
    if folder:
        cluster.folder = folder
    else:
        cluster.remember()
    recorded = cluster.python
    named = recorded if python is None else python or None
    cluster.python = named
    facts = collect_facts(cluster)
    if not facts.write_error:
        cluster.folder = facts.folder
        cluster.python = named if is_supported(facts) else recorded
        cluster.remember()
        cluster.python = named
        if is_supported(facts) and facts.rsync and facts.hpctrain != __version__:
            install_hpctrain(cluster, facts)
            facts = collect_facts(cluster)
    if text := "\n".join(find_problems(cluster, facts)):
        raise UserError(text)
    click.echo(
        f"{cluster.name} is ready: Python {facts.python_version} ({facts.python}), "
        f"hpctrain {facts.hpctrain}, folder {facts.folder}"
    )
