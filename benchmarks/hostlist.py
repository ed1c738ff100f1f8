"""How long `expand_hostlist` takes for 10,000 names, as a part of what `scontrol show hostnames` takes.

    python benchmarks/hostlist.py [--rounds N] [--limit RATIO]

Both answer the same list in turn and have to give the same names. scontrol's time is that of the whole call,
as a program makes it: start the process, read its output, split it into names. Its configuration is two lines
long, and it asks no daemon. The ratio is that of the fastest calls, which noise can only raise.

The promise is for lists of single names, and of few ranges, which are long then. Lists of many short ranges
are measured too: there the time goes into reading the ranges. Exits with 1 where a ratio that is promised is
above the limit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpctrain.cluster import compress_hostlist, expand_hostlist

NUM_NAMES = 10_000


def scattered(num_nodes: int) -> str:
    """A list of NUM_NAMES nodes that are free here and there on a cluster of `num_nodes`."""
    chosen = sorted(random.Random(1).sample(range(1, num_nodes + 1), NUM_NAMES))
    return compress_hostlist(f"n{node:05}" for node in chosen)


PROMISED = {
    "one range": f"n[1-{NUM_NAMES}]",
    "one range, padded": f"node[{1:05}-{NUM_NAMES:05}]",
    "ten ranges": "n[" + ",".join(f"{first}-{first + 999}" for first in range(1, 11_000, 1100)) + "]",
    "two brackets": "rack[1-100]node[1-100]",
    "three brackets": "x[0-9]c[0-9]s[0-99]",
    "singles in a bracket": "n[" + ",".join(str(node) for node in range(1, 2 * NUM_NAMES, 2)) + "]",
    "singles": ",".join(f"n{node}" for node in range(1, 2 * NUM_NAMES, 2)),
}
OTHERS = {
    "a range for each of 100 racks": ",".join(f"rack{rack}node[1-100]" for rack in range(100)),
    "scattered over 10,200 nodes": scattered(10_200),
    "scattered over 16,384 nodes": scattered(16_384),
}


def compare(hostlist: str, rounds: int, environ: dict[str, str]) -> tuple[float, float]:
    """Seconds of the fastest call of scontrol, and of ours."""
    theirs, ours = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        done = subprocess.run(
            ["scontrol", "show", "hostnames", hostlist],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        expected = done.stdout.split()
        theirs.append(time.perf_counter() - start)
        start = time.perf_counter()
        names = expand_hostlist(hostlist)
        ours.append(time.perf_counter() - start)
        if names != expected or len(names) != NUM_NAMES:
            sys.exit(f"{hostlist[:80]!r} is expanded in another way than by scontrol")
        # Else the next call's time would have the end of these names in it.
        del names
    return min(theirs), min(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--limit", type=float, default=0.1)
    options = parser.parse_args()
    if not shutil.which("scontrol"):
        sys.exit("scontrol is not here to compare with")
    above = False
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "slurm.conf")
        conf.write_text("ClusterName=benchmark\nSlurmctldHost=localhost\n")
        print(f"{'10,000 names as':32} scontrol       ours   ratio   (limit {options.limit})")
        for shape, hostlist in {**PROMISED, **OTHERS}.items():
            theirs, ours = compare(hostlist, options.rounds, {**os.environ, "SLURM_CONF": str(conf)})
            promised = shape in PROMISED
            above |= promised and ours / theirs > options.limit
            print(
                f"{shape:32} {theirs * 1000:5.2f} ms   {ours * 1000:5.2f} ms   {ours / theirs:5.3f}"
                f"{'' if promised else '   (not promised)'}"
            )
    sys.exit(above)


if __name__ == "__main__":
    main()
