"""Run commands on a cluster over SSH (`--on`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.common import INTERRUPTED, echo_log
from hpctrain.errors import UserError
from hpctrain.jobs.runs.run_log_reader import LogMark, LogPosition
from hpctrain.remote.login_node import LoginNode, collect_facts, find_problems
from hpctrain.remote.protocol import CLUSTER_VARIABLE, RECORD_START
from hpctrain.remote.send_code import LocalCode, send_code
from hpctrain.remote.ssh_connection import SSH_FAILED

#: Commands that submit the code of this machine.
_SENDING = ("submit", "sweep", "resume")
#: Subcommands of `sweep` that submit nothing.
_NOT_SENDING = ("status", "best", "cancel")
#: Commands that read their standard input.
_READING = ("exec", "shell", "attach")
#: Commands that only wait, so they run again after a lost connection.
_REPEATABLE = ("wait",)


def run_on_login_node(name: str, args: Sequence[str]) -> int:
    """Run `hpctrain ARGS` on a cluster, and return its exit code."""
    if args[0] == "serve":
        raise UserError(
            f"`serve` cannot run with --on, because its pages would only be visible on {name}. Log in "
            f"with `ssh -L 8000:127.0.0.1:8000 {name}`, and run `hpctrain serve --port 8000` there."
        )
    options = _parse_options(args)
    login_node = _open_login_node(name)
    is_sending = args[0] in _SENDING
    prints_only = options.get("show_config") or options.get("help")
    if is_sending and (*args, "")[1] not in _NOT_SENDING and not prints_only:
        _send_project(login_node, needs_slurm=options.get("backend") != "local")
    # A lost connection kills programs on its terminal, which must not happen during a submission.
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not is_sending
    remedy = "Run the command again."
    if is_sending:
        remedy = f"`hpctrain --on {login_node.name} list` shows whether the run was submitted."
    stream = LogStream(login_node)
    command = login_node.connection.command(login_node.hpctrain(args), terminal=has_terminal)
    # Other commands would take the input of the caller, such as that of a loop in the shell.
    stdin = None if has_terminal or args[0] in _READING else subprocess.DEVNULL
    try:
        if options.get("follow"):
            code = stream.run(args)
        else:
            while (code := subprocess.call(command, stdin=stdin)) == SSH_FAILED and args[0] in _REPEATABLE:
                login_node.connection.reopen(print_note)
    except KeyboardInterrupt:
        if not (is_sending or stream.follow):
            raise
        click.echo(stream.follow.get("detached") or f"\n{remedy}", err=True)
        return INTERRUPTED
    login_node.connection.check(code, remedy)
    return code


def asks_for_help(args: Sequence[str]) -> bool:
    """True if a command that submits would only print its help, which needs no cluster."""
    return args[0] in _SENDING and bool(_parse_options(args)["help"])


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


class LogStream:
    """Output of a command that follows a run: records with positions, of which none is lost or repeated."""

    def __init__(self, login_node: LoginNode) -> None:
        self._login_node, self._last_notice = login_node, ""
        self._positions: dict[str, LogPosition] = {}
        self.follow: dict[str, Any] = {}
        """The command that continues, and the message after an interrupt; empty before the start."""

    def run(self, args: Sequence[str]) -> int:
        """Run `hpctrain ARGS` on the cluster, and return its exit code."""
        while (code := self._run_once(args)) == SSH_FAILED and (self.follow or args[0] == "logs"):
            self._login_node.connection.reopen(print_note)
            args = self.follow.get("args", args)
        return code

    def _run_once(self, args: Sequence[str]) -> int:
        positions = {source: asdict(position) for source, position in self._positions.items()}
        start = json.dumps({**self.follow, "positions": positions})
        command = self._login_node.connection.command(self._login_node.hpctrain(args, stream=True))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(f"{start}\n".encode())  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                for data in process.stdout or ():
                    line = data.decode(errors="replace")
                    if not line.startswith(RECORD_START):
                        echo_log(line, nl=False)
                    elif line.endswith("\n"):
                        self._receive(*json.loads(line[len(RECORD_START) :]))
            except BaseException:
                process.kill()
                raise
        return process.returncode

    def _receive(self, kind: str, content: Any, mark: list[Any] | None) -> None:
        if kind == "follow":
            self.follow = content
            return
        if mark is not None:
            self._positions.setdefault(mark[0], LogPosition()).advance(LogMark(*mark))
        elif content == self._last_notice:
            return  # A new connection reports the state of the job again.
        else:
            self._last_notice = content
        echo_log(content, nl=False, err=kind == "err")


def print_note(message: str) -> None:
    click.echo(message, err=True)


def needed_login_node(ctx: click.Context) -> LoginNode:
    if name := ctx.meta.get(CLUSTER_VARIABLE):
        return _open_login_node(name)
    raise click.UsageError(f"This command requires a cluster: `hpctrain --on CLUSTER {ctx.info_name} …`", ctx)


def _open_login_node(name: str) -> LoginNode:
    login_node = LoginNode(name, Path.cwd(), os.environ)
    login_node.connection.open()
    return login_node


def _send_project(login_node: LoginNode, *, needs_slurm: bool) -> None:
    """Check the cluster, and send the code of the current project."""
    code = LocalCode.find(login_node.root, login_node.environ)
    login_node.remember()  # so that another project with this name takes another folder
    facts = collect_facts(login_node)
    if problems := list(
        find_problems(login_node, facts, size_bytes=code.size_bytes, needs_slurm=needs_slurm)
    ):
        raise UserError("\n".join(problems))
    login_node.folder = facts["folder"]
    login_node.remember()
    send_code(login_node, code)
    print_note(f"Sent {len(code.files)} files to {login_node.name}:{login_node.folder}")
