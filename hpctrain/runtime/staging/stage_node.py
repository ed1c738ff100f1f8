"""Copies for the ranks of this node: `python -P -m hpctrain.runtime.staging.stage_node PLAN`.

PLAN is a JSON object: the `folder` of the copies, the `sources` by name, and the folder of `packs`, which is
null if the Python environment is not staged. One process per node runs this program.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from hpctrain.cluster.parent_death import die_with_supervisor
from hpctrain.errors import EXIT_CONTINUE, StagingError
from hpctrain.files import make_folder, make_private_folder, try_lock, write_atomic
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, STAGED_ENVIRONMENT, RunDir
from hpctrain.runtime.staging.environment_pack import pack_environment, relocate
from hpctrain.runtime.staging.local_copy import stage
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS

#: Between checks for another process that stages. The supervisor limits the time.
_POLL_INTERVAL_S = 0.2


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    """Copy everything, and write the result to the run folder. Return the exit code: 1 after an error."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    plan, node = json.loads(argv[0]), int(environ["SLURM_NODEID"])
    run, attempt = RunDir(Path(environ[RUN_DIR_VARIABLE])), int(environ[ATTEMPT_VARIABLE])
    folder, result = Path(plan["folder"]), run.staging_result(attempt, node)
    staged, error, name = {}, None, "files"
    try:
        make_private_folder(folder, "TMPDIR (--setup)")
        if plan["packs"] is not None:
            name, chosen = "the Python environment", run.staged_environment(environ["SLURM_JOB_ID"])
            pack = _choose_pack(chosen, Path(plan["packs"]), folder, is_first=node == 0)
        # Several nodes may share a disk.
        while (lock := try_lock(folder / ".lock")) is None:
            time.sleep(_POLL_INTERVAL_S)
        if plan["packs"] is not None:
            staged[name] = stage(
                pack, folder / STAGED_ENVIRONMENT, finish=partial(relocate, folder / STAGED_ENVIRONMENT)
            )
        for name, source in plan["sources"].items():
            staged[name] = stage(Path(source), folder / name)
        os.close(lock)
    except (OSError, StagingError) as failure:
        error = f"cannot stage {name}: {re.sub(r'^.Errno [0-9]+. ', '', str(failure))}"
    make_folder(result.parent)
    write_atomic(result, json.dumps({"staged": staged, "error": error}) + "\n", durable=False)
    return int(error is not None)


def _choose_pack(chosen: Path, packs: Path, folder: Path, *, is_first: bool) -> Path:
    """Return the pack that the first node has recorded in `chosen`, for all attempts of this job."""
    while True:
        with suppress(OSError):
            if (pack := Path(chosen.read_text())).exists():
                return pack
        if is_first:
            pack = pack_environment(packs, folder)
            make_folder(chosen.parent)
            write_atomic(chosen, str(pack), durable=False)
        else:
            time.sleep(_POLL_INTERVAL_S)


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Incomplete copies have other names. The supervisor removes them with the folder.
    os._exit(EXIT_CONTINUE)


if __name__ == "__main__":
    die_with_supervisor(os.environ)
    raise SystemExit(main(sys.argv[1:], os.environ))
