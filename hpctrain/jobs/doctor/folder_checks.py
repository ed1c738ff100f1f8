"""Checks of the runs folder: whether nodes share it, and whether locks and renames work there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.doctor.probe_command import run_python_probe
from hpctrain.text import format_size

_TOPIC = "Runs folder"
_LIMIT_S = 20.0

#: Smaller clock differences do not affect the order of events.
_CLOCK_TOLERANCE_S = 2.0
#: With less space, a checkpoint of a medium-sized model fills the file system.
_LITTLE_BYTES = 10 << 30

#: Names of the capabilities, and the consequence for runs if a capability is missing.
_USES = {
    "lock": ("locking", "two submissions could use the same run folder at the same time"),
    "rename": ("rename", "a process that is killed at the wrong moment could leave an incomplete file"),
    "append": ("append", "records of events and metrics could be lost"),
}


def check_runs_folder(folder: Path, environ: Mapping[str, str], *, other_machines: bool) -> list[Finding]:
    """Return findings on the folder in which runs are created.

    All probes use a temporary folder in it, which is removed afterwards.

    Args:
        folder: parent of the run folders; the folder may not exist yet.
        environ: environment of the probe.
        other_machines: True if runs use machines other than this one.

    Raises:
        ProbeFailed: the file system does not respond.
    """
    module = "hpctrain.jobs.doctor.filesystem_probe"
    facts = run_python_probe(["-m", module, str(folder)], environ, _LIMIT_S)
    return [*_place(facts, other_machines), *_abilities(facts)]


def _place(facts: dict[str, Any], other_machines: bool) -> Iterator[Finding]:
    mount = facts["mount"]
    kind = f"{mount['type']} ({mount['source']} on {mount['point']})" if mount else "unknown"
    where = f"{facts['folder']}: {kind}"
    if not other_machines or (mount and mount["is_shared"]):
        yield Finding(_TOPIC, "file system", where)
    elif facts["per_node"]:
        yield Finding(
            _TOPIC,
            "file system",
            where,
            "problem",
            "This folder is local to each node. Submit from a folder that all nodes share, or use --run-dir.",
        )
    else:
        yield Finding(
            _TOPIC,
            "file system",
            where,
            "note",
            "This folder appears to be on a local disk. Unless the nodes mount this disk under the same "
            "path, set --run-dir to a folder that all nodes share.",
        )
    free = facts["free_bytes"]
    yield Finding(
        _TOPIC,
        "free space",
        format_size(free),
        "ok" if free >= _LITTLE_BYTES else "note",
        ""
        if free >= _LITTLE_BYTES
        else "Checkpoints usually need more space. Delete files, or choose another --run-dir.",
    )


def _abilities(facts: dict[str, Any]) -> Iterator[Finding]:
    if "write" in facts:
        yield Finding(
            _TOPIC,
            "writing",
            f"not possible: {facts['write']}",
            "problem",
            "Submit from a folder that you can write to, or use --run-dir.",
        )
        return
    options = set(facts["mount"]["options"]) if facts["mount"] else set()
    for key, (name, otherwise) in _USES.items():
        if trouble := facts[key]:
            yield Finding(
                _TOPIC,
                name,
                trouble,
                "problem",
                f"Use another file system for runs (--run-dir). On this file system, {otherwise}.",
            )
        elif key == "lock" and (
            lax := options & {"localflock", "nolock", "local_lock=all", "local_lock=flock"}
        ):
            yield Finding(
                _TOPIC,
                name,
                f"works on one machine only (mounted with {', '.join(sorted(lax))})",
                "note",
                "Always resubmit a run from the machine that first submitted it.",
            )
        else:
            yield Finding(_TOPIC, name, "works")
    ahead_s = facts["clock_ahead_s"]
    if abs(ahead_s) > _CLOCK_TOLERANCE_S:
        yield Finding(
            _TOPIC,
            "clock",
            f"file times are {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this "
            "machine's clock",
            "note",
            "Times in the logs of different machines may not be comparable. Synchronize the clocks (NTP).",
        )
    else:
        yield Finding(
            _TOPIC, "clock", f"file times are within {_CLOCK_TOLERANCE_S:g} s of this machine's clock"
        )
