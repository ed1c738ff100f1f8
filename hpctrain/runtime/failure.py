"""One file for each rank that fails: what happened, where, and in which order among its peers."""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.files import write_atomic
from hpctrain.runtime.code_copy import missing_in_copy

#: Key in the attempt's store that counts failures: the order in which ranks failed, by one clock.
FAILURE_COUNT_KEY = "hpctrain/failures"
_STORE_TIMEOUT = timedelta(seconds=2)
#: Marks an exception that another start would only bring about again.
_FINAL = "_hpctrain_final"


def mark_final(error: BaseException) -> None:
    """Let `error` end the run where it turns out to be the cause: the ranks are not started again."""
    setattr(error, _FINAL, True)


def write_failure(path: Path, error: BaseException, log: Path, environ: Mapping[str, str]) -> None:
    """Describe `error` in the file at `path`. Never raises: the error itself must not be lost over it.

    The rank is still connected to its peers here, so one whose error is the cause takes its place in the
    order before any peer can notice that it is gone.
    """
    if hint := missing_in_copy(error, environ):
        error.add_note(f"{hint}.")
    record = {
        "time": time.time(),
        "order": _take_place(environ),
        "rank": int(environ["RANK"]),
        "host": socket.gethostname(),
        "node": environ.get("SLURMD_NODENAME"),
        "kind": "exception",
        "error": type(error).__name__,
        "classes": [its.__name__ for its in type(error).__mro__],
        "message": f"{error}: {hint}" if hint else str(error),
        "traceback": _traceback(error),
        "log": str(log),
        # What is wrong with what the user asked for is so at every start.
        "final": getattr(error, _FINAL, False) or isinstance(error, UserError),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record, indent=1) + "\n")
    except OSError as problem:
        print(f"hpctrain: {path} cannot be written: {problem}", file=sys.stderr)


def _traceback(error: BaseException) -> str:
    """The traceback from the user's first line on: how we got there is of no use to anybody."""
    package = str(Path(__file__).parents[1])
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((package, "<frozen runpy>")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _take_place(environ: Mapping[str, str]) -> int | None:
    """This failure's number among those of the attempt, or None where there is no store to ask.

    A rank that never imported torch has no peers that could fail of it, and needs no place.
    """
    if "torch" not in sys.modules:
        return None
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
        return int(store.add(FAILURE_COUNT_KEY, 1))
    except Exception:  # noqa: BLE001 (whatever hinders it, the failure is written all the same)
        return None
