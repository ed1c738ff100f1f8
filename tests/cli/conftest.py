import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import run_command


@pytest.fixture
def hpctrain(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in an empty folder with a script; Slurm is not reachable."""
    (tmp_path / "train.py").write_text("import sys\nprint('args', sys.argv[1:])\n")

    def call(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return run_command([sys.executable, "-m", "hpctrain", *args], env, cwd=tmp_path, check=False)

    return call
