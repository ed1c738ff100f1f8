"""The command `hpctrain`: imports subcommands on use, and converts errors to exit codes."""

from __future__ import annotations

import gc
import io
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from hpctrain._version import __version__
from hpctrain.cli.common import INTERRUPTED, program_name
from hpctrain.errors import HpctrainError, SpecError
from hpctrain.remote.protocol import CLUSTER_VARIABLE, STREAM_VARIABLE
from hpctrain.text import suggest

#: Subcommands by task, in the order of the help.
_TASKS = {
    "Run": ("init", "submit", "sweep", "wait", "cancel", "requeue", "resume"),
    "Understand": ("status", "list", "logs", "top", "serve", "report", "checkpoints", "verify", "profile"),
    "Work interactively": ("shell", "attach"),
    "Check and explain": ("doctor", "explain", "env", "exec"),
    "Test faults": ("chaos", "sandbox"),
    "Set up": ("setup", "pull", "completion"),
}
_COMMANDS = tuple(name for names in _TASKS.values() for name in names)
#: Modules of commands that share one. All others are `command` in the module of their name.
_MODULES = {
    **dict.fromkeys(("init", "completion"), "main"),
    **dict.fromkeys(("wait", "cancel", "requeue", "profile", "chaos"), "control"),
    "env": "exec",
    "list": "status",
    "attach": "shell",
}

#: Commands that run on this machine, and use the cluster themselves.
_WITH_CLUSTER = ("setup", "pull")
#: Commands whose later arguments belong to a script.
_WITH_SCRIPT = ("submit", "sweep", "exec", "shell")


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module = _MODULES.get(cmd_name)
        name = f"{cmd_name}_command" if module else "command"
        command: click.Command = getattr(import_module(f"hpctrain.cli.{module or cmd_name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for task, names in _TASKS.items():
            with formatter.section(task):
                commands = ((name, self.get_command(ctx, name)) for name in names)
                rows = [(f"{name:{width}}", cmd.get_short_help_str(200)) for name, cmd in commands if cmd]
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # `--on` may also follow the command. All words after a script, or `--`, are those of a program.
        end = args.index("--") if "--" in args else len(args)
        if args and args[0] in _WITH_SCRIPT:
            indices = [index for index, arg in enumerate(args[:end]) if arg.partition("=")[0] == "--on"]
            if indices and indices[0] > 1 and not ctx.resilient_parsing:
                click.echo(
                    "Note: `--on` only selects a cluster if it directly follows `hpctrain` or "
                    f"`hpctrain {args[0]}`. Here, it belongs to the program.",
                    err=True,
                )
            end = min(end, 2)
        for index, arg in enumerate(args[:end]):
            if arg == "--on" or arg.startswith("--on="):
                size = 2 if arg == "--on" else 1
                args = [*args[index : index + size], *args[:index], *args[index + size :]]
                break
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            hint = suggest(args[0], _COMMANDS, otherwise="`hpctrain --help` lists the commands.")
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        # Shell completion parses without running.
        cluster = None if ctx.resilient_parsing else ctx.params["on"]
        if cluster is not None and args[0] not in _WITH_CLUSTER:
            from hpctrain.cli.on_login_node import asks_for_help, run_on_login_node

            if not asks_for_help(args):
                ctx.exit(run_on_login_node(cluster, args))
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
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader has closed the pipe; click exits quietly.
            raise
        except OSError as error:
            place = f"{str(error.filename)!r}: " if error.filename else ""
            click.echo(f"Error: {place}{error.strerror or error}.", err=True)
            ctx.exit(HpctrainError.exit_code)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="hpctrain")
@click.option(
    "--on",
    metavar="CLUSTER",
    help="Run the command on CLUSTER, a host in ~/.ssh/config. `submit` also sends the code of this project.",
)
@click.pass_context
def cli(ctx: click.Context, on: str | None) -> None:
    """Run PyTorch training on Slurm. Preemptions and crashes do not change the result."""
    # Jobs do not inherit these variables, which describe this command alone.
    for name in (CLUSTER_VARIABLE, STREAM_VARIABLE):
        ctx.meta[name] = on if name == CLUSTER_VARIABLE and on else os.environ.pop(name, None)


@click.command("init")
@click.argument("file", default="hpctrain.yaml", type=click.Path(path_type=Path))
def init_command(file: Path) -> None:
    """Write FILE (default: hpctrain.yaml) with every option of submit, commented out.

    An existing file is never overwritten.
    """
    from hpctrain.jobs.options.config_files import config_template

    try:
        with open(file, "x", encoding="utf-8") as new:
            new.write(config_template())
    except FileExistsError:
        raise SpecError(
            f"{str(file)!r} already exists and was not changed. Choose another file name."
        ) from None
    except OSError as error:
        raise SpecError(f"Cannot write {str(file)!r}: {error.strerror}. Choose another file name.") from error
    click.echo(
        f"Wrote {file}. Edit this file, then run `{program_name()} submit --show-config SCRIPT` to see the "
        "effective values."
    )


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script for SHELL. It completes commands, options, their values and runs.

    \b
        bash  eval "$(hpctrain completion bash)"    in ~/.bashrc
        zsh   eval "$(hpctrain completion zsh)"     in ~/.zshrc, after compinit
        fish  hpctrain completion fish | source     in ~/.config/fish/config.fish
    """  # noqa: D301
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "hpctrain", "_HPCTRAIN_COMPLETE").source())


def main() -> None:
    try:
        cli(prog_name="hpctrain")
    finally:
        # Skips the final garbage collection, because the process exits (see hpctrain.cli).
        gc.freeze()
