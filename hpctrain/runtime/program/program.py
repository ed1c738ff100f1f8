"""Run the program of a rank: a script, a module, or a command."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpctrain.cluster.processes import die_with_parent
from hpctrain.jobspec.launcher import RANK_LAUNCHERS, ProgramKind
from hpctrain.runtime.program.process_observer import ChildRelay
from hpctrain.runtime.program.script_monitor import ScriptMonitor
from hpctrain.runtime.snapshot_imports import copied_path
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS, pending_stop_signal, read_stop_grace

#: Python options with which a command can still run in this interpreter.
_HARMLESS_OPTIONS = ("-u", "-B", "-P")
#: Maximum seconds that stopped processes may outlive their shell; the supervisor or Slurm ends them earlier.
_STOP_LIMIT_S = 300.0


@dataclass(frozen=True)
class Program:
    kind: ProgramKind
    entry: str
    """Path of a script, name of a module, or the command."""
    args: tuple[str, ...]

    @classmethod
    def resolve(cls, kind: ProgramKind, entry: str, args: Sequence[str]) -> Program:
        """Return the program; `python script.py` and console scripts run in this interpreter, as scripts."""
        program = cls(kind, entry, tuple(args))
        if kind != "command":
            return program
        if entry.endswith(".py") and os.path.isfile(entry):
            return cls("script", entry, program.args)
        if _is_this_python(entry):
            return _parse_python_command(program)
        path = shutil.which(entry)
        # The processes that a launcher starts are observed only if it runs as a child process.
        is_launcher = os.path.basename(entry) in RANK_LAUNCHERS
        if path is not None and not is_launcher and _is_this_python(_shebang_interpreter(path)):
            return cls("script", path, program.args)
        return program

    @property
    def import_folder(self) -> str:
        """First folder in `sys.path`, as set by Python."""
        if self.kind == "script":
            return str(Path(copied_path(self.entry, os.environ)).resolve().parent)
        return copied_path(os.getcwd(), os.environ)

    def run(self, relay: ChildRelay | None = None) -> None:
        """Run the program as `__main__`, or as a child process."""
        if self.kind == "command":
            _run_command([self.entry, *self.args], relay)
        # As in `python SCRIPT`; this interpreter was started with -P, so no other folder precedes it.
        sys.path.insert(0, self.import_folder)
        if self.kind == "script":
            script = copied_path(self.entry, os.environ)
            sys.argv = [script, *self.args]
            runpy.run_path(script, run_name="__main__")
        else:
            sys.argv = [self.entry, *self.args]
            runpy.run_module(self.entry, run_name="__main__", alter_sys=True)


class CommandFailed(SystemExit):
    """A command exited with a code other than 0."""


def _parse_python_command(program: Program) -> Program:
    """Return the code that `python ...` would run, or the command itself if an option is unknown."""
    args = list(program.args)
    while args and args[0] in _HARMLESS_OPTIONS:
        args.pop(0)
    if len(args) > 1 and args[0] == "-m":
        return Program("module", args[1], tuple(args[2:]))
    if args and not args[0].startswith("-"):
        return Program("script", os.path.abspath(args[0]), tuple(args[1:]))
    return program


def _is_this_python(command: str) -> bool:
    path = shutil.which(command) if command else None
    if path is None or not os.path.basename(path).startswith("python"):
        return False
    this_python = (os.path.dirname(sys.executable), os.path.realpath(sys.executable))
    return (os.path.dirname(path), os.path.realpath(path)) == this_python


def _shebang_interpreter(path: str) -> str:
    with open(path, "rb") as file:
        line = file.readline(1024)
    command = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if command and os.path.basename(command[0]) == "env":
        command.pop(0)
    return command[0] if command else ""


def _run_command(command: list[str], relay: ChildRelay | None) -> NoReturn:
    """Run a command as a child process, and exit with its exit code."""
    for number in STOP_SIGNALS:
        # Recorded by `signal_recorder`. They also reach the command, which decides when to exit.
        signal.signal(number, lambda *_: None)
    command = [copied_path(path, os.environ) if os.path.exists(path) else path for path in command]
    try:
        environ = {**os.environ, **(relay.variables if relay is not None else {})}
        child = subprocess.Popen(command, env=environ, preexec_fn=die_with_parent)
    except OSError as error:
        raise RuntimeError(f"cannot start the command {shlex.join(command)}: {error.strerror}") from error
    ScriptMonitor(child.pid).start()
    code = child.wait()
    stop = pending_stop_signal()
    if stop is None and -code in STOP_SIGNALS:  # Slurm may signal the command before this process.
        stop = signal.Signals(-code)
    if relay is not None and stop is not None:
        # The signal ends a shell immediately, but its programs may still train to the common step, or save.
        relay.wait_until_exited(read_stop_grace(os.environ).get(stop.name, _STOP_LIMIT_S))
    raise CommandFailed(128 - code if code < 0 else code) if code else SystemExit(0)
