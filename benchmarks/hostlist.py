"""Time of `expand_hostlist` for 10,000 names, relative to `scontrol show hostnames`.

    python benchmarks/hostlist.py [--rounds N]

Both expand the same list alternately and must return the same names. The time of scontrol includes the
complete call: start of the process, reading of the output, and splitting. Its configuration has two lines,
and no daemon is contacted. The ratio is that of the fastest calls, because noise can only increase times.
Lists of many short ranges have no limit, because most of their time is parsing.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Results

from hpctrain.cluster import compress_hostlist, expand_hostlist

NUM_NAMES = 10_000


def scattered(num_nodes: int) -> str:
    """Return a list of NUM_NAMES scattered nodes of a cluster of `num_nodes`."""
    chosen = sorted(random.Random(1).sample(range(1, num_nodes + 1), NUM_NAMES))
    return compress_hostlist(f"n{node:05}" for node in chosen)


FEW_RANGES = {
    "one range": f"n[1-{NUM_NAMES}]",
    "one range, padded": f"node[{1:05}-{NUM_NAMES:05}]",
    "ten ranges": "n[" + ",".join(f"{first}-{first + 999}" for first in range(1, 11_000, 1100)) + "]",
    "two brackets": "rack[1-100]node[1-100]",
    "three brackets": "x[0-9]c[0-9]s[0-99]",
    "singles in a bracket": "n[" + ",".join(str(node) for node in range(1, 2 * NUM_NAMES, 2)) + "]",
    "singles": ",".join(f"n{node}" for node in range(1, 2 * NUM_NAMES, 2)),
}
MANY_RANGES = {
    "a range for each of 100 racks": ",".join(f"rack{rack}node[1-100]" for rack in range(100)),
    "scattered over 10,200 nodes": scattered(10_200),
    "scattered over 16,384 nodes": scattered(16_384),
}


def compare(hostlist: str, rounds: int, environ: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of the fastest calls of scontrol and of hpctrain."""
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
            sys.exit(f"{hostlist[:80]!r} is expanded differently by scontrol")
        # Otherwise, the next call would include the deallocation of these names.
        del names
    return min(theirs), min(ours)


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=100)
    options = results.parse()
    if not shutil.which("scontrol"):
        sys.exit("scontrol not found; it is required for the comparison")
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "slurm.conf")
        conf.write_text("ClusterName=benchmark\nSlurmctldHost=localhost\n")
        for shape, hostlist in {**FEW_RANGES, **MANY_RANGES}.items():
            theirs, ours = compare(hostlist, options.rounds, {**os.environ, "SLURM_CONF": str(conf)})
            results.add(shape, ours / theirs, limit=0.1 if shape in FEW_RANGES else None)
    results.finish()


if __name__ == "__main__":
    main()
