"""Lets torch's own threads come to rest before the interpreter ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

#: What torch calls the threads in which gloo's exchanges run.
_GLOO_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
#: Between two looks at them. This thread sleeps meanwhile, so that one of theirs may have the interpreter.
_LOOK_EVERY_S = 0.005
#: Longer than this nobody waits: an exchange with a peer that is gone rests, too, and needs nothing any more.
_LIMIT_S = 5.0


def leave_group() -> None:
    """Destroy the default process group, if there is one, once its threads rest."""
    # Whoever has not imported it has no group.
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        let_gloo_rest()
        torch.distributed.destroy_process_group()


def let_gloo_rest() -> None:
    """Wait until no thread of gloo is about to drop the tensors of an exchange that is over.

    For a tensor that Python has made it needs the interpreter, and aborts the process if that has gone: the
    rank would fail after its last line. They rest when all sleep, and have slept since the last look.
    """
    if not _TASKS.exists():
        time.sleep(0.1)
        return
    until = time.monotonic() + _LIMIT_S
    before: dict[str, str] | None = None
    while time.monotonic() < until:
        now = _asleep()
        if now is not None and now in ({}, before):
            return
        before = now
        time.sleep(_LOOK_EVERY_S)


def _asleep() -> dict[str, str] | None:
    """How often each thread of gloo has gone to sleep; None where one is awake."""
    counts = {}
    for task in os.listdir(_TASKS):
        try:
            status = (_TASKS / task / "status").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if fields["Name"] != _GLOO_THREAD:
            continue
        if not fields["State"].startswith("S"):
            return None
        counts[task] = fields["voluntary_ctxt_switches"]
    return counts
