"""Screenshot of a report for the README, from a real run that is preempted and killed.

    .venv/bin/python scripts/take_report_picture.py

Requires a headless Chromium. The run trains examples/digits.py on this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "report.png"
_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
_LIMIT_S = 300.0


def main() -> None:
    """Run, disturb the run, create the report, take the screenshot."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        sys.exit(f"No browser found. Install one of {', '.join(_BROWSERS)}.")
    with TemporaryDirectory() as folder:
        run = Path(folder) / "runs" / "digits"
        script = str(ROOT / "examples" / "digits.py")
        shape = ("--backend=local", "--nodes=2", "--ntasks-per-node=1", "--no-code-snapshot")
        hpctrain("submit", *shape, f"--run-dir={run}", script, "--max-steps=4000", cwd=folder)
        wait_for_step(run, 500)
        hpctrain("requeue", str(run), cwd=folder)
        wait_for_step(run, 1500)
        kill_rank(run)
        hpctrain("wait", str(run), cwd=folder)
        hpctrain("report", str(run), cwd=folder)
        PICTURE.parent.mkdir(exist_ok=True)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        size = ["--window-size=1100,900", "--force-device-scale-factor=1"]
        subprocess.run(
            [*command, *size, f"--screenshot={PICTURE}", f"file://{run}/report.html"],
            check=True,
            timeout=60,
            stderr=subprocess.DEVNULL,
        )


def hpctrain(*words: str, cwd: str) -> None:
    """Run a command of hpctrain in the folder `cwd`."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "hpctrain", *words], cwd=cwd, env=environ, check=True, timeout=_LIMIT_S
    )


def wait_for_step(run: Path, step: int) -> None:
    """Wait until the run has logged a step."""
    deadline = time.monotonic() + _LIMIT_S
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step}' not in metrics.read_text():
        if time.monotonic() > deadline:
            sys.exit(f"The run did not reach step {step} within {_LIMIT_S:.0f} s.")
        time.sleep(0.1)


def kill_rank(run: Path) -> None:
    """Kill rank 1 of the run."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"HPCTRAIN_RUN_DIR={run}".encode() in variables and b"SLURM_PROCID=1" in variables:
            os.kill(int(environ.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
