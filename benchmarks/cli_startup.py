"""Time of `hpctrain submit --dry-run`, as a multiple of the import time of its dependencies.

    python benchmarks/cli_startup.py [--rounds N] [--limit RATIO]

Both run alternately, to share the effects of other load. The ratio is that of the fastest runs, because noise
can only increase times. All modules are compiled in advance, regardless of PYTHONDONTWRITEBYTECODE. Exits
with 1 if the ratio exceeds the limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASELINE = [sys.executable, "-c", "import click, yaml, jinja2"]


def seconds(command: list[str], cwd: str) -> float:
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": f"{cwd}/compiled", "PYTHONDONTWRITEBYTECODE": ""}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1.5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text("print('hello')\n")
        dry_run = [
            sys.executable,
            "-m",
            "hpctrain",
            "submit",
            "--dry-run",
            "--nodes",
            "2",
            "train.py",
            "--lr",
            "1",
        ]
        pairs = [(seconds(BASELINE, folder), seconds(dry_run, folder)) for _ in range(options.rounds)]
    baseline, ours = (min(times) for times in zip(*pairs, strict=True))
    ratio = ours / baseline
    print(f"import click, yaml, jinja2   {baseline * 1000:6.1f} ms")
    print(f"hpctrain submit --dry-run    {ours * 1000:6.1f} ms")
    print(f"ratio                        {ratio:6.2f}    (limit {options.limit})")
    sys.exit(ratio > options.limit)


if __name__ == "__main__":
    main()
