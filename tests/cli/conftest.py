import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.commands import environment

from hpctrain.cli.main import cli


@pytest.fixture
def hpctrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in this process, in an empty folder with a script; Slurm is not reachable."""
    (tmp_path / "train.py").write_text("import sys\nprint('args', sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)

    def call(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        variables = environment(env)
        removed = dict.fromkeys(os.environ.keys() - variables.keys())
        result = CliRunner().invoke(cli, args, prog_name="hpctrain", env={**removed, **variables})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return subprocess.CompletedProcess(args, result.exit_code, result.stdout, result.stderr)

    return call
