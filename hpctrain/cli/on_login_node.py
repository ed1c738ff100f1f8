"""Use a cluster over SSH: run commands there (`--on`), and `hpctrain setup` and `pull`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from hpctrain._version import __version__
from hpctrain.cli.common import INTERRUPTED, echo_log, short_path
from hpctrain.errors import CheckpointError, UserError
from hpctrain.jobs.runs.run_log_reader import LogMark, LogPosition
from hpctrain.remote.login_node import (
    VENV,
    LocalCode,
    LoginNode,
    collect_facts,
    find_problems,
    is_supported,
    send_code,
    shell_path,
)
from hpctrain.remote.protocol import CLUSTER_VARIABLE, RECORD_START
from hpctrain.remote.ssh_connection import SSH_FAILED, LoginNodeUnreachable
from hpctrain.rundir import RunDir

#: Commands that submit the code of this machine.
_SENDING = ("submit", "sweep", "resume")
#: Subcommands of `sweep` that submit nothing.
_NOT_SENDING = ("status", "best", "cancel")
#: Commands that read their standard input.
_READING = ("exec", "shell", "attach")
#: Commands that only wait, so they run again after a lost connection.
_REPEATABLE = ("wait",)
#: Names of hpctrain's checkpoints. The files of a script's own checkpoints belong together.
_CHECKPOINTS = (f"step-{'[0-9]' * 8}*", ".saving-*", ".deleting-*")
#: Number of tries to copy a run if checkpoints are deleted on the cluster during the copy.
_MAX_TRIES = 3
#: Number of consecutive lost connections without progress after which the copy fails.
_MAX_STALLED = 8


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
    if options.get("follow"):
        code = _follow(login_node, args, remedy if is_sending else "")
    else:
        command = login_node.connection.command(login_node.hpctrain(args), terminal=has_terminal)
        # Other commands would take the input of the caller, such as that of a loop in the shell.
        stdin = None if has_terminal or args[0] in _READING else subprocess.DEVNULL
        try:
            while (code := subprocess.call(command, stdin=stdin)) == SSH_FAILED and args[0] in _REPEATABLE:
                login_node.connection.reopen(_report)
        except KeyboardInterrupt:
            if not is_sending:
                raise
            click.echo(f"\n{remedy}", err=True)
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


def _follow(login_node: LoginNode, args: Sequence[str], interrupted: str) -> int:
    stream = LogStream(login_node)
    try:
        return stream.run(args)
    except KeyboardInterrupt:
        click.echo(stream.follow.get("detached") or f"\n{interrupted}", err=True)
        return INTERRUPTED


class LogStream:
    """Output of a command that follows a run, continued after a lost connection.

    The cluster sends each piece of text as one record, with its position in the logs. A piece is shown only
    when its record is complete, and a new connection continues after the last record: no line is lost or
    repeated.
    """

    def __init__(self, login_node: LoginNode) -> None:
        self._login_node, self._last_notice = login_node, ""
        self._positions: dict[str, LogPosition] = {}
        self.follow: dict[str, Any] = {}
        """The command that continues, and the message after an interrupt; empty before the start."""

    def run(self, args: Sequence[str]) -> int:
        """Run `hpctrain ARGS` on the cluster, and return its exit code."""
        while (code := self._run_once(args)) == SSH_FAILED and (self.follow or args[0] == "logs"):
            self._login_node.connection.reopen(_report)
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


def _report(message: str) -> None:
    click.echo(message, err=True)


def _needed_login_node(ctx: click.Context) -> LoginNode:
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
    _report(f"Sent {len(code.files)} files to {login_node.name}:{login_node.folder}")


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
def setup_command(ctx: click.Context, folder: str | None, python: str | None) -> None:
    """Check a cluster (--on), and install hpctrain there if it is missing or has another version.

    Without --python, hpctrain is installed into a new environment, which also contains the packages of the
    cluster's python3. Later commands use the same folder and Python.
    """
    login_node = _needed_login_node(ctx)
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
    """Build a wheel here, and install it on the cluster with pip, whose output is shown.

    It is installed for the Python that the user named, otherwise into an environment of its own.
    """
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


@click.command("pull")
@click.argument("run", metavar="RUN")
@click.argument("dest", metavar="[DEST]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--all-checkpoints", is_flag=True, help="Copy all checkpoints, not only the newest and the best."
)
@click.pass_context
def pull_command(ctx: click.Context, run: str, dest: Path | None, all_checkpoints: bool) -> None:
    """Copy RUN from a cluster (--on) to DEST: logs, metrics, report, newest and best checkpoints.

    DEST is runs/RUN by default. If the connection is lost, the copy continues after reconnecting. A second
    `pull` copies only what has changed.
    """
    login_node = _needed_login_node(ctx)
    copied, size_bytes, stalled, tries = dest, -1, 0, 0
    while True:
        try:
            status = _query_status(login_node, run)
            copied = dest or Path("runs", status["run_id"])
            has_report = _copy(login_node, status, copied, all_checkpoints=all_checkpoints)
            folders = (RunDir(copied).checkpoints / name for name in _kept_checkpoints(status))
            if (missing := next((path for path in folders if not _is_complete(path)), None)) is None:
                break
            if (tries := tries + 1) == _MAX_TRIES:
                raise UserError(
                    f"The copy of {missing} is incomplete, because the run deletes its old checkpoints "
                    "faster than they are copied. Try again when the run has ended."
                )
        except LoginNodeUnreachable as error:
            before = size_bytes
            size_bytes = sum(path.lstat().st_size for path in copied.rglob("*")) if copied else 0
            stalled = stalled + 1 if size_bytes == before else 0
            if error.is_permanent or stalled == _MAX_STALLED:
                raise
            login_node.connection.reopen(_report)
            time.sleep(min(2.0**stalled / 2, 30.0))
    click.echo(f"Run copied to {short_path(copied)}{', with report.html' if has_report else ''}")


def _query_status(login_node: LoginNode, run: str) -> dict[str, Any]:
    result = login_node.connection.run(login_node.hpctrain(["status", run, "--json"]))
    if result.returncode:
        raise UserError(f"{login_node.name}: {result.stderr.strip().removeprefix('Error: ')}")
    status: dict[str, Any] = json.loads(result.stdout)
    return status


def _kept_checkpoints(status: dict[str, Any]) -> list[str]:
    """Return the names of the newest and the best checkpoint in the run folder."""
    best = (status.get("best") or {}).get("checkpoint")
    paths = [Path(path) for path in (status["checkpoint"], best) if path]
    folder = RunDir(Path(status["run_dir"])).checkpoints
    return sorted({path.name for path in paths if path.parent == folder})


def _is_complete(checkpoint: Path) -> bool:
    """True if a copy has all files of its manifest. A checkpoint of the script has no manifest."""
    from hpctrain.checkpoint.format.manifest import Manifest

    if not re.fullmatch(r"step-\d{8,}", checkpoint.name):
        return True
    try:
        files = Manifest.read(checkpoint).files
        return all((checkpoint / entry.name).stat().st_size == entry.bytes for entry in files)
    except (CheckpointError, OSError):
        return False


def _copy(login_node: LoginNode, status: dict[str, Any], copied: Path, *, all_checkpoints: bool) -> bool:
    """Copy the run, and return true if it has a new report."""
    from hpctrain.telemetry.report.run_results import read_spec

    run_dir = status["run_dir"]
    if (copied_run := read_spec(RunDir(copied).spec).get("run_dir")) not in (None, run_dir):
        raise UserError(
            f"{str(copied)!r} contains the run in {copied_run!r}, but the run to copy is in {run_dir!r}. "
            "Name another destination (DEST)."
        )
    login_node.connection.find_rsync()
    report = login_node.connection.run(login_node.hpctrain(["report", run_dir]))
    if report.returncode:
        reason = report.stderr.strip().removeprefix("Error: ")
        _report(f"Warning: cannot write report.html on {login_node.name}: {reason}")
    options = ["-rlpt", "--partial", *(["--info=progress2"] if sys.stdout.isatty() else [])]
    if not all_checkpoints:
        names = _kept_checkpoints(status)
        options += [f"--include=/checkpoints/{name}{inside}" for name in names for inside in ("", "/**")]
        options += [f"--exclude={t}/checkpoints/{name}" for t in ("", "/task-*") for name in _CHECKPOINTS]
    copied.mkdir(parents=True, exist_ok=True)
    login_node.connection.rsync([*options, f"{login_node.name}:{run_dir}/", f"{copied}/"], may_vanish=True)
    return not report.returncode
