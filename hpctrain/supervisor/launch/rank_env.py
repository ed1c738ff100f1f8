"""Transfer of `--env` variables to a rank, through the environment and not on a command line.

Every user of a node can read the command lines of all processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpctrain.rundir import ENV_PREFIX


def prefixed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with a prefix, to hide them from the programs that start the rank."""
    return {ENV_PREFIX + name: value for name, value in env.items()}


def restore_names_command(command: list[str], names: Iterable[str]) -> list[str]:
    """Return a command that restores the names of the prefixed variables, then runs `command`.

    env(1) expands `${NAME}` in the argument of `-S`, so the command line contains only names.
    """
    names = list(names)
    if not names:
        return command
    unset = [f"--unset={ENV_PREFIX}{name}" for name in names]
    split = " ".join(f"{name}=${{{ENV_PREFIX}{name}}}" for name in names)
    return ["/usr/bin/env", *unset, f"--split-string={split}", *command]
