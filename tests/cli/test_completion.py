"""Shell completion: real key presses in bash and zsh, and the completions of fish."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.commands import environment
from helpers.terminal import Terminal

from hpctrain.cli.main import cli

#: Command of an interactive shell, and the lines that load completion.
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(hpctrain completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit && compinit -D && eval "$(hpctrain completion zsh)"'),
}


def shell_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a shell that finds the command `hpctrain`."""
    program = folder / "bin" / "hpctrain"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpctrain "$@"\n')
    program.chmod(0o755)
    return environment({"PATH": f"{folder}/bin:{os.environ['PATH']}", "TERM": "dumb"})


def require(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def complete(terminal: Terminal, line: str, expected: str) -> None:
    """Type a line and press Tab; the line must become `expected`. Then clear the line."""
    terminal.send(f"{line}\t")
    terminal.expect(expected.removeprefix(line))
    terminal.send('\x15echo do""ne\n')
    terminal.expect("done")


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(SHELLS))
def test_shell_completes_commands_options_values_runs_and_files(tmp_path, shell):
    require(shell)
    argv, load = SHELLS[shell]
    (tmp_path / "runs" / "digits-1").mkdir(parents=True)
    (tmp_path / "runs" / "digits-1" / "spec.yaml").touch()
    (tmp_path / "train_digits.py").touch()
    (tmp_path / "elsewhere" / "r").mkdir(parents=True)
    with Terminal(argv, tmp_path, shell_environment(tmp_path)) as terminal:
        terminal.send(f'{load} && echo re""ady\n')
        terminal.expect("ready")
        complete(terminal, "hpctrain che", "hpctrain checkpoints ")
        complete(terminal, "hpctrain submit --stop-b", "hpctrain submit --stop-before-limit ")
        complete(terminal, "hpctrain submit --resume-mode suc", "hpctrain submit --resume-mode successor ")
        complete(terminal, "hpctrain submit tr", "hpctrain submit train_digits.py ")
        complete(terminal, "hpctrain status di", "hpctrain status digits-1 ")
        complete(terminal, "hpctrain logs else", "hpctrain logs elsewhere/")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid_in_its_shell(shell):
    result = CliRunner().invoke(cli, ["completion", shell])
    assert f"_HPCTRAIN_COMPLETE={shell}_complete" in result.stdout
    require(shell)
    checked = subprocess.run([shell, "-n"], input=result.stdout, text=True, timeout=120, check=False)
    assert checked.returncode == 0
