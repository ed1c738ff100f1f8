"""Install hpctrain on a cluster (`hpctrain setup`)."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from hpctrain._version import __version__
from hpctrain.cli.on_login_node import needed_login_node
from hpctrain.errors import UserError
from hpctrain.remote.login_node import VENV, LoginNode, collect_facts, find_problems, is_supported, shell_path


@click.command(name="setup")
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
    login_node = needed_login_node(ctx)
    if folder:
        login_node.folder = folder
    else:
        login_node.remember()
    recorded = login_node.python
    login_node.python = named = recorded if python is None else python or None
    facts = collect_facts(login_node)
    if not facts["write_error"]:
        login_node.folder = facts["folder"]
        login_node.python = named if is_supported(facts) else recorded
        login_node.remember()
        login_node.python = named
        if is_supported(facts) and facts["rsync"] and facts["hpctrain"] != __version__:
            _install(login_node, facts["python"])
            facts = collect_facts(login_node)
    if problems := list(find_problems(login_node, facts)):
        raise UserError("\n".join(problems))
    click.echo(
        f"{login_node.name} is ready: Python {facts['python_version']} ({facts['python']}), "
        f"hpctrain {facts['hpctrain']}, folder {facts['folder']}"
    )


def _install(login_node: LoginNode, python: str) -> None:
    """Install a wheel of this version on the cluster, by default into an environment of its own."""
    source = _source()
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source]
        if subprocess.call(pip, stdout=sys.stderr):
            raise UserError(
                "Cannot build a wheel of hpctrain on this machine (see pip's messages above). Install "
                f"hpctrain {__version__} on {login_node.name} yourself, and run this command again."
            )
        (wheel,) = Path(folder).glob("*.whl")
        if (built := wheel.name.split("-")[1]) != __version__:
            raise UserError(
                f"This machine runs hpctrain {__version__}, but {source} contains {built}. Install "
                "hpctrain on this machine again, and then run this command again."
            )
        login_node.connection.rsync([str(wheel), f"{login_node.name}:{login_node.folder}/"])
    wheel_path = shell_path(f"{login_node.folder}/{wheel.name}")
    python = shlex.quote(python)
    create = ":" if login_node.python else f'{python} -m venv --system-site-packages "{VENV}"'
    target = python if login_node.python else f'"{VENV}/bin/python"'
    # `--force-reinstall` replaces another build of the same version; its dependencies stay.
    install = f"{target} -m pip install --quiet"
    script = f"{create} && {install} --no-deps --force-reinstall {wheel_path} && {install} {wheel_path}"
    command = login_node.connection.command(f"{script}; E=$?; rm {wheel_path}; exit $E")
    code = subprocess.call(command, stdout=sys.stderr)
    login_node.connection.check(code)
    if code:
        raise UserError(
            f"Cannot install hpctrain on {login_node.name} (see pip's messages above). Install hpctrain "
            f"{__version__} there yourself, then run `hpctrain --on {login_node.name} setup --python PATH` "
            "with the path of its Python."
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
    return f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
