"""TorchX's test on a real Slurm, a shell script that takes a wheel and a virtual environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_script(tmp_path):
    source = Path(os.environ["CONFORMANCE_SOURCES"], "torchx")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*pip, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    script = ["bash", str(source / "scripts/slurmtest.sh"), str(wheel), sys.prefix]
    subprocess.run(script, check=True, timeout=280)
