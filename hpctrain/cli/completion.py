"""Print the completion script for a shell (`hpctrain completion`)."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL. It completes commands, options, their values and runs.

    \b
        bash  eval "$(hpctrain completion bash)"    in ~/.bashrc
        zsh   eval "$(hpctrain completion zsh)"     in ~/.zshrc, after compinit
        fish  hpctrain completion fish | source     in ~/.config/fish/config.fish
    """  # noqa: D301
    completion = get_completion_class(shell)
    assert completion is not None
    root = context.find_root().command
    click.echo(completion(root, {}, "hpctrain", "_HPCTRAIN_COMPLETE").source())
