"""Shell completion: the script of each shell, and real key presses in bash."""

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


class Terminal:
    """An interactive bash in a folder, with hpctrain's completion."""

    def __init__(self, folder: Path) -> None:
        env = environment({"PATH": f"{folder}/bin:{os.environ['PATH']}", "TERM": "dumb"})
        (folder / "bin").mkdir()
        program = folder / "bin" / "hpctrain"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpctrain "$@"\n')
        program.chmod(0o755)
        self._master, slave = pty.openpty()
        argv = ["bash", "--norc", "--noprofile", "-i"]
        self._process = subprocess.Popen(
            argv, cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.press('eval "$(hpctrain completion bash)" && echo re""ady\n', "ready")

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
def test_bash_completes_commands_options_values_partitions_runs_and_files(tmp_path):
    terminal = Terminal(tmp_path)
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.write_text("#!/bin/sh\necho batch\necho gpu-long\n")
    sinfo.chmod(0o755)
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid_in_its_shell(shell):
    result = CliRunner().invoke(cli, ["completion", shell])
    assert f"_HPCTRAIN_COMPLETE={shell}_complete" in result.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert (
        subprocess.run([shell, "-n"], input=result.stdout, text=True, timeout=20, check=False).returncode == 0
    )


@pytest.mark.slow
def test_completion_imports_no_torch(tmp_path):
    env = {"_HPCTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "hpctrain submit --ti", "COMP_CWORD": "2"}
    result = run_command([sys.executable, "-X", "importtime", "-m", "hpctrain"], env, cwd=tmp_path)
    assert result.stdout == "plain,--time\n"
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "rich", "asyncio"}
