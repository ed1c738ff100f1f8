"""Shell completion: real key presses in bash and zsh, and the completions of fish."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.commands import environment, run_command

from hpctrain.cli.main import cli

#: Command of an interactive shell, and the lines that load completion.
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(hpctrain completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit && compinit -D && eval "$(hpctrain completion zsh)"'),
}


def shell_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a shell that finds the command `hpctrain` and a simulated `sinfo`."""
    programs = {
        "hpctrain": f'#!/bin/sh\nexec {sys.executable} -m hpctrain "$@"\n',
        "sinfo": "#!/bin/sh\necho batch\necho gpu-long\n",
    }
    (folder / "bin").mkdir()
    for name, content in programs.items():
        (folder / "bin" / name).write_text(content)
        (folder / "bin" / name).chmod(0o755)
    return environment({"PATH": f"{folder}/bin:{os.environ['PATH']}", "TERM": "dumb"})


def require(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


class Terminal:
    """An interactive shell in a folder, with hpctrain's completion."""

    def __init__(self, shell: str, folder: Path) -> None:
        env = shell_environment(folder)
        self._master, slave = pty.openpty()
        argv, load = SHELLS[shell]
        self._process = subprocess.Popen(
            argv, cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.press(f'{load} && echo re""ady\n', "ready")

    def press(self, keys: str, expected: str, limit_s: float = 60.0) -> str:
        """Send keys, and return the output after the text that is expected in it has appeared."""
        os.write(self._master, keys.encode())
        output, deadline = "", time.monotonic() + limit_s
        while expected not in output:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._master], [], [], max(0.0, left))
            assert ready, f"no {expected!r} after {limit_s} s: {output!r}"
            output += os.read(self._master, 65536).decode()
        return output

    def complete(self, line: str, expected: str) -> None:
        """Type a line and press Tab; the line must become `expected`. Then clear the line."""
        self.press(f"{line}\t", expected.removeprefix(line))
        self.press('\x15echo do""ne\n', "done")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(SHELLS))
def test_shell_completes_commands_options_values_partitions_runs_and_files(tmp_path, shell):
    require(shell)
    terminal = Terminal(shell, tmp_path)
    (tmp_path / "runs" / "digits-1").mkdir(parents=True)
    (tmp_path / "runs" / "digits-1" / "spec.yaml").touch()
    (tmp_path / "train_digits.py").touch()
    (tmp_path / "elsewhere" / "r").mkdir(parents=True)
    try:
        terminal.complete("hpctrain che", "hpctrain checkpoints ")
        terminal.complete("hpctrain submit --stop-b", "hpctrain submit --stop-before-limit ")
        terminal.complete("hpctrain submit --resume-mode suc", "hpctrain submit --resume-mode successor ")
        terminal.complete("hpctrain submit --partition gp", "hpctrain submit --partition gpu-long ")
        terminal.complete("hpctrain submit tr", "hpctrain submit train_digits.py ")
        terminal.complete("hpctrain status di", "hpctrain status digits-1 ")
        terminal.complete("hpctrain logs else", "hpctrain logs elsewhere/")
    finally:
        terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hpctrain che", "checkpoints"),
        ("hpctrain submit --stop-b", "--stop-before-limit"),
        ("hpctrain submit --resume-mode suc", "successor"),
        ("hpctrain submit --partition gp", "gpu-long"),
        ("hpctrain submit tr", "train_digits.py"),
    ],
)
def test_fish_completes(tmp_path, line, expected):
    require("fish")
    (tmp_path / "train_digits.py").touch()
    command = ["fish", "--no-config", "-c", f"hpctrain completion fish | source; complete -C '{line}'"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=shell_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert expected in [found.split("\t")[0] for found in result.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid_in_its_shell(shell):
    result = CliRunner().invoke(cli, ["completion", shell])
    assert f"_HPCTRAIN_COMPLETE={shell}_complete" in result.stdout
    require(shell)
    checked = subprocess.run([shell, "-n"], input=result.stdout, text=True, timeout=120, check=False)
    assert checked.returncode == 0


@pytest.mark.slow
def test_completion_imports_no_torch(tmp_path):
    env = {"_HPCTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "hpctrain submit --ti", "COMP_CWORD": "2"}
    result = run_command([sys.executable, "-X", "importtime", "-m", "hpctrain"], env, cwd=tmp_path)
    assert result.stdout == "plain,--time\nplain,--time-min\n"
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "rich", "asyncio"}
