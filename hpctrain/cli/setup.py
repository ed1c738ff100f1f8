"""Check a cluster, and install hpctrain there (`hpctrain setup`)."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from hpctrain._version import __version__
from hpctrain.cli.on_cluster import needed_cluster
from hpctrain.errors import UserError
from hpctrain.remote.cluster import VENV, Cluster, shell_path
from hpctrain.remote.environment_check import ClusterFacts, collect_facts, find_problems, is_supported


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
            _install(cluster, facts)
            facts = collect_facts(cluster)
    if text := "\n".join(find_problems(cluster, facts)):
        raise UserError(text)
    click.echo(
        f"{cluster.name} is ready: Python {facts.python_version} ({facts.python}), "
        f"hpctrain {facts.hpctrain}, folder {facts.folder}"
    )


def _install(cluster: Cluster, facts: ClusterFacts) -> None:
    """Build a wheel here, and install it on the cluster with pip, whose output is shown.

    It is installed for the Python that the user named, otherwise into an environment of its own.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, _source()]
        if subprocess.call(pip, stdout=sys.stderr):
            raise UserError(
                "Cannot build a wheel of hpctrain on this machine (see pip's messages above). Install "
                f"hpctrain {__version__} on {cluster.name} yourself, and run this command again."
            )
        (wheel,) = Path(folder).glob("*.whl")
        if (built := wheel.name.split("-")[1]) != __version__:
            raise UserError(
                f"This machine runs hpctrain {__version__}, but {_source()} contains {built}. Install "
                "hpctrain on this machine again, and then run this command again."
            )
        cluster.connection.rsync([str(wheel), f"{cluster.name}:{cluster.folder}/"])
    wheel_path = shell_path(f"{cluster.folder}/{wheel.name}")
    python = shlex.quote(facts.python)
    create = ":" if cluster.python else f'{python} -m venv --system-site-packages "{VENV}"'
    target = python if cluster.python else f'"{VENV}/bin/python"'
    # `--force-reinstall` replaces another build of the same version; its dependencies stay.
    install = f"{target} -m pip install --quiet"
    script = f"{create} && {install} --no-deps --force-reinstall {wheel_path} && {install} {wheel_path}"
    command = cluster.connection.command(f"{script}; E=$?; rm {wheel_path}; exit $E")
    code = subprocess.call(command, stdout=sys.stderr)
    cluster.connection.check(code)
    if code:
        raise UserError(
            f"Cannot install hpctrain on {cluster.name} (see pip's messages above). Install hpctrain "
            f"{__version__} there yourself, then run `hpctrain --on {cluster.name} setup --python PATH` with "
            "the path of its Python."
        )


def _source() -> str:
    """Return the source of the installed package for pip: its folder or file, otherwise its version."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        record = distribution("hpctrain").read_text("direct_url.json")
    except PackageNotFoundError:
        record = None
    if not record:
        return f"hpctrain=={__version__}"
    origin = json.loads(record)
    if "vcs_info" not in origin:
        return str(origin["url"])
    vcs = origin["vcs_info"]
    folder = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
    return f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}{folder}"
