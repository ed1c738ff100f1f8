"""Commands on a cluster (`--on`): the same command runs on the login node, and its output appears here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click

from hpctrain.cli.common import echo_log
from hpctrain.errors import UserError
from hpctrain.remote.cluster import Cluster

#: Commands that submit the code of this machine.
_SENDING = ("submit", "sweep", "resume")
#: Subcommands of `sweep` that submit nothing.
_NOT_SENDING = ("status", "best", "cancel")
_INTERRUPTED = 130
_FOLLOW = ("-f", "--follow")
#: Commands that only wait, so they run again after a lost connection.
_REPEATABLE = ("wait",)


def run_on_clusters(names: Sequence[str], args: Sequence[str]) -> int:
    """Run `hpctrain ARGS` on a cluster, and return its exit code.

    Raises:
        UserError: several clusters are named for a command other than `list`.
        ClusterUnreachable: the login failed, or the connection was lost.
    """
    if len(names) > 1:
        if args[0] != "list":
            raise UserError(f"--on names {len(names)} clusters, but only `list` accepts several. Name one.")
        raise NotImplementedError
    cluster = open_cluster(names[0])
    if args[0] in _SENDING and (*args, "")[1] not in _NOT_SENDING:
        send_project(cluster, needs_slurm=not _names_local_backend(args))
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not any(word in args for word in _FOLLOW):
        code = subprocess.call(cluster.connection.command(cluster.hpctrain(args), terminal=has_terminal))
    else:
        code = _follow(cluster, args)
    words = "Run the command again."
    if args[0] in _SENDING:
        words = f"`hpctrain --on {cluster.name} list` shows if the run was submitted."
    cluster.connection.check(code, words)
    return code


def _follow(cluster: Cluster, args: Sequence[str]) -> int:
    from hpctrain.remote.log_stream import LogStream

    stream = LogStream(cluster, lambda text, err: echo_log(text, nl=False, err=err))
    try:
        return stream.run(args)
    except KeyboardInterrupt:
        click.echo(stream.detached or "", err=True)
        return _INTERRUPTED


def open_cluster(name: str) -> Cluster:
    """Log in to a cluster.

    Raises:
        ClusterUnreachable: the login failed.
    """
    cluster = Cluster(name, Path.cwd(), os.environ)
    cluster.connection.open()
    return cluster


def send_project(cluster: Cluster, *, needs_slurm: bool) -> None:
    """Check the cluster, and send the code of the current project.

    Raises:
        UserError: the cluster cannot run the project; the message has a line for each problem.
        ClusterUnreachable: the connection was lost.
    """
    from hpctrain.remote.environment_check import find_problems, read_facts
    from hpctrain.remote.send_code import LocalCode, send_code

    code = LocalCode.read(cluster.root, cluster.environ)
    facts = read_facts(cluster)
    problems = find_problems(cluster, facts, size_bytes=code.size_bytes, needs_slurm=needs_slurm)
    if text := "\n".join(problems):
        raise UserError(text)
    cluster.folder = facts.folder
    send_code(cluster, code)
    cluster.remember()
    click.echo(f"Sent {len(code.files)} files to {cluster.name}:{cluster.folder}", err=True)


def _names_local_backend(args: Sequence[str]) -> bool:
    return "--backend=local" in args or ("--backend", "local") in pairwise(args)
