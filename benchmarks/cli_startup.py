"""Time of `hpctrain submit --dry-run`, relative to the imports that it requires.

    python benchmarks/cli_startup.py [--rounds N]

Both processes run alternately, with compiled modules. The times are those of the fastest rounds, because
noise can only increase times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Results

BASELINE = [sys.executable, "-c", "import click, yaml"]


def seconds(command: list[str], cwd: str) -> float:
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": f"{cwd}/compiled", "PYTHONDONTWRITEBYTECODE": ""}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return time.perf_counter() - start


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=15)
    options = results.parse()
    submit = [sys.executable, "-m", "hpctrain", "submit", "--dry-run", "--nodes", "2"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text("print('hello')\n")
        dry_run = [*submit, "train.py", "--lr", "1"]
        pairs = [(seconds(BASELINE, folder), seconds(dry_run, folder)) for _ in range(options.rounds)]
    baseline, ours = (min(times) for times in zip(*pairs, strict=True))
    results.add("import click, yaml", baseline * 1000, "ms")
    results.add("hpctrain submit --dry-run", ours * 1000, "ms")
    results.add("ratio", ours / baseline, limit=2.0)
    results.finish()


if __name__ == "__main__":
    main()
