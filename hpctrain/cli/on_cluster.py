"""Run a command on the login node of a cluster, and show its output here (`--on`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.common import INTERRUPTED, echo_log
from hpctrain.errors import UserError
from hpctrain.remote.cluster import Cluster
from hpctrain.remote.protocol import CLUSTER_VARIABLE
from hpctrain.remote.ssh_connection import SSH_FAILED

#: Commands that submit the code of this machine.
_SENDING = ("submit", "sweep", "resume")
#: Subcommands of `sweep` that submit nothing.
_NOT_SENDING = ("status", "best", "cancel")
#: Commands that read their standard input.
_READING = ("exec", "shell", "attach")
#: Commands that only wait, so they run again after a lost connection.
_REPEATABLE = ("wait",)


def run_on_cluster(name: str, args: Sequence[str]) -> int:
    """Run `hpctrain ARGS` on a cluster, and return its exit code."""
    if args[0] == "serve":
        raise UserError(
            f"`serve` cannot run with --on, because its pages would only be visible on {name}. Log in "
            f"with `ssh -L 8000:127.0.0.1:8000 {name}`, and run `hpctrain serve --port 8000` there."
        )
    options = _parse_options(args)
    cluster = open_cluster(name)
    prints_only = options.get("show_config") or options.get("help")
    if args[0] in _SENDING and (*args, "")[1] not in _NOT_SENDING and not prints_only:
        send_project(cluster, needs_slurm=options.get("backend") != "local")
    # A lost connection kills programs on its terminal, which must not happen during a submission.
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty() and args[0] not in _SENDING
    remedy = "Run the command again."
    if args[0] in _SENDING:
        remedy = f"`hpctrain --on {cluster.name} list` shows whether the run was submitted."
    if options.get("follow"):
        code = _follow(cluster, args, remedy if args[0] in _SENDING else "")
    else:
        command = cluster.connection.command(cluster.hpctrain(args), terminal=has_terminal)
        # Other commands would take the input of the caller, such as that of a loop in the shell.
        stdin = None if has_terminal or args[0] in _READING else subprocess.DEVNULL
        try:
            while (code := subprocess.call(command, stdin=stdin)) == SSH_FAILED and args[0] in _REPEATABLE:
                cluster.connection.reopen(lambda message: click.echo(message, err=True))
        except KeyboardInterrupt:
            if args[0] not in _SENDING:
                raise
            click.echo(f"\n{remedy}", err=True)
            return INTERRUPTED
    cluster.connection.check(code, remedy)
    return code


def asks_for_help(args: Sequence[str]) -> bool:
    """True if a command that submits would only print its help, which needs no cluster."""
    # `resume RUN --help` opens the run, so it needs one.
    return args[0] in ("submit", "sweep") and bool(_parse_options(args)["help"])


def _parse_options(args: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command that may follow a run; the arguments of a script are not among them."""
    if args[0] not in ("logs", *_SENDING):
        return {}
    command, arguments = import_module(f"hpctrain.cli.{args[0]}").command, list(args[1:])
    if isinstance(command, click.Group):
        subcommand = arguments.pop(0) if arguments and arguments[0] in command.commands else "submit"
        command = command.commands[subcommand]
    values = _parse(command, arguments)
    options = values.get("options")
    if isinstance(options, tuple):  # those of `submit`, after the run that is resumed
        values |= _parse(import_module("hpctrain.cli.submit").command, list(options))
    return values


def _parse(command: click.Command, arguments: list[str]) -> dict[str, Any]:
    with command.make_context(
        None, [], resilient_parsing=True, help_option_names=["-h", "--help"]
    ) as context:
        values, _, _ = command.make_parser(context).parse_args(arguments)
        help_option = command.get_help_option(context)
    return {**values, "help": help_option is not None and values.get(str(help_option.name)) is True}


def _follow(cluster: Cluster, args: Sequence[str], interrupted: str) -> int:
    from hpctrain.remote.log_stream import LogStream

    stream = LogStream(cluster, lambda text, err: echo_log(text, nl=False, err=err))
    try:
        return stream.run(args)
    except KeyboardInterrupt:
        click.echo(stream.detached or f"\n{interrupted}", err=True)
        return INTERRUPTED


def run_json(cluster: Cluster, args: Sequence[str]) -> Any:
    """Return the JSON document that `hpctrain ARGS` prints on a cluster."""
    result = cluster.connection.run(cluster.hpctrain(args))
    if result.returncode:
        raise UserError(f"{cluster.name}: {result.stderr.strip().removeprefix('Error: ')}")
    return json.loads(result.stdout)


def needed_cluster(ctx: click.Context) -> Cluster:
    if name := ctx.meta.get(CLUSTER_VARIABLE):
        return open_cluster(name)
    raise click.UsageError(f"This command requires a cluster: `hpctrain --on CLUSTER {ctx.info_name} …`", ctx)


def open_cluster(name: str) -> Cluster:
    cluster = Cluster(name, Path.cwd(), os.environ)
    cluster.connection.open()
    return cluster


def send_project(cluster: Cluster, *, needs_slurm: bool) -> None:
    """Check the cluster, and send the code of the current project."""
    from hpctrain.remote.environment_check import collect_facts, find_problems
    from hpctrain.remote.send_code import LocalCode, send_code

    code = LocalCode.find(cluster.root, cluster.environ)
    cluster.remember()  # so that another project with this name takes another folder
    facts = collect_facts(cluster)
    problems = find_problems(cluster, facts, size_bytes=code.size_bytes, needs_slurm=needs_slurm)
    if text := "\n".join(problems):
        raise UserError(text)
    cluster.folder = facts.folder
    cluster.remember()
    send_code(cluster, code)
    click.echo(f"Sent {len(code.files)} files to {cluster.name}:{cluster.folder}", err=True)
