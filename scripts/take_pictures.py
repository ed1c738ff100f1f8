"""Screenshots for the README and the documentation, from real runs: a report, and the pages of `serve`.

    .venv/bin/python scripts/take_pictures.py [report] [serve]

Requires a headless Chromium. The runs train examples/digits.py on this machine.
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
PICTURES = ROOT / "docs" / "assets"
SCRIPT = str(ROOT / "examples" / "digits.py")
_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
_LOCAL = ("--backend=local", "--no-code-snapshot")
_LIMIT_S = 300.0


def main() -> None:
    """Take all screenshots, or only those of the report or of `serve`."""
    takers = {"report": take_report, "serve": take_served}
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        sys.exit(f"No browser found. Install one of {', '.join(_BROWSERS)}.")
    for name in sys.argv[1:] or takers:
        with TemporaryDirectory() as folder:
            takers[name](browser, folder)


def take_report(browser: str, folder: str) -> None:
    """Take the screenshot of the report of a run that is preempted and killed."""
    run = Path(folder) / "runs" / "digits"
    shape = ("--nodes=2", "--ntasks-per-node=1")
    hpctrain("submit", *shape, *_LOCAL, f"--run-dir={run}", SCRIPT, "--max-steps=4000", cwd=folder)
    wait_for_step(run, 500)
    hpctrain("requeue", str(run), cwd=folder)
    wait_for_step(run, 1500)
    kill_rank(run)
    hpctrain("wait", str(run), cwd=folder)
    hpctrain("report", str(run), cwd=folder)
    take(browser, f"file://{run}/report.html", "report.png", 900)


def take_served(browser: str, folder: str) -> None:
    """Take the screenshots of the list of runs and of a sweep, as `hpctrain serve` shows them."""
    space = ("--over=lr=1e-3,3e-3", "--over=seed=0:2", "--concurrent=2", "--run-dir=runs/rates")
    hpctrain("sweep", *space, *_LOCAL, SCRIPT, "--max-steps=100", cwd=folder)
    hpctrain("submit", *_LOCAL, "--run-dir=runs/typo", SCRIPT, "--max-steps=many", cwd=folder)
    hpctrain("wait", "rates", cwd=folder)
    command = [sys.executable, "-u", "-m", "hpctrain", "serve"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            take(browser, address, "dashboard.png", 640)
            take(browser, address.replace("/?", "/run/rates?"), "sweep.png", 1500)
        finally:
            server.terminate()


def take(browser: str, url: str, name: str, height: int) -> None:
    """Take the screenshot of a page."""
    PICTURES.mkdir(exist_ok=True)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = [f"--window-size=1100,{height}", "--force-device-scale-factor=1"]
    subprocess.run(
        [*command, *size, f"--screenshot={PICTURES / name}", url],
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
