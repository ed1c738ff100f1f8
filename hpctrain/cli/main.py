"""The command `hpctrain`: imports subcommands on use, and converts errors to exit codes."""

from __future__ import annotations

import gc
import io
import sys
from importlib import import_module
from typing import Any

import click

from hpctrain._version import __version__
from hpctrain.errors import HpctrainError
from hpctrain.text import suggest

#: Subcommands in the order of the help; each is `command` in the module of its name.
_COMMANDS = (
    "init",
    "submit",
    "sweep",
    "status",
    "list",
    "logs",
    "report",
    "top",
    "profile",
    "serve",
    "checkpoints",
    "verify",
    "wait",
    "cancel",
    "requeue",
    "resume",
    "shell",
    "attach",
    "debug",
    "env",
    "exec",
    "doctor",
    "explain",
    "chaos",
    "simulate",
    "sandbox",
    "completion",
    "man",
)


#: Names of the same commands in other tools.
_ALIASES = {
    "ckpt": "checkpoints",
    "continue": "resume",
    "dashboard": "serve",
    "kill": "cancel",
    "launch": "submit",
    "ls": "list",
    "ps": "list",
    "restart": "resume",
    "run": "submit",
    "stop": "cancel",
    "tail": "logs",
    "ui": "serve",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"hpctrain.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            if args[0] in _ALIASES:
                return super().resolve_command(ctx, [_ALIASES[args[0]], *args[1:]])
            hint = suggest(args[0], _COMMANDS, otherwise="`hpctrain --help` lists the commands.")
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        # Files of a run may contain invalid Unicode.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except HpctrainError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            # The reader has closed the pipe; click exits quietly.
            raise
        except OSError as error:
            where = f"{str(error.filename)!r}: " if error.filename else ""
            click.echo(f"Error: {where}{error.strerror or error}.", err=True)
            ctx.exit(HpctrainError.exit_code)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpctrain")
def cli() -> None:
    """Run PyTorch training on Slurm. Preemptions and crashes do not change the result."""


def main() -> None:
    """Run the command line."""
    try:
        cli(prog_name="hpctrain")
    finally:
        # Skips the final garbage collection, because the process exits (see hpctrain.cli).
        gc.freeze()
