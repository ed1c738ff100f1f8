"""The command `hpctrain`: finds its subcommands when they are used, and turns errors into exit codes."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any

import click

from hpctrain import __version__
from hpctrain.errors import HpctrainError

#: Subcommands in the order of the help; each lives in the module of its name as `command`.
_COMMANDS = (
    "init",
    "submit",
    "status",
    "list",
    "logs",
    "report",
    "top",
    "serve",
    "checkpoints",
    "wait",
    "cancel",
    "requeue",
    "env",
    "exec",
    "doctor",
    "chaos",
    "simulate",
    "sandbox",
)


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
            from difflib import get_close_matches

            close = get_close_matches(args[0], _COMMANDS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HpctrainError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            # The reader of our output has seen enough; click ends quietly.
            raise
        except OSError as error:
            where = f"{str(error.filename)!r}: " if error.filename else ""
            click.echo(f"Error: {where}{error.strerror or error}. See to it, and try again.", err=True)
            ctx.exit(HpctrainError.exit_code)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpctrain")
def cli() -> None:
    """Hand Slurm one PyTorch script: preempted, killed or timed out, it ends as an undisturbed run."""


def main() -> None:
    """Run the command line."""
    try:
        cli(prog_name="hpctrain")
    finally:
        # The process ends: what is still there need not be searched for garbage (see hpctrain.cli).
        gc.freeze()
