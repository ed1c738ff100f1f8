"""The folder of the runs: whether nodes share it, and whether locks and renames hold there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.doctor.program import python_facts

_TOPIC = "Runs folder"
_LIMIT_S = 20.0

#: Clocks that differ by less do not mix up what happened when.
_CLOCK_TOLERANCE_S = 2.0
#: Below this a checkpoint of a middling model fills the file system.
_LITTLE_BYTES = 10 << 30

#: What a run does with each, and so what comes of it where it does not work.
_USES = {
    "lock": ("locking", "two submissions could take the same run folder at once"),
    "rename": ("rename", "a kill in the wrong moment could leave half a file"),
    "append": ("append", "lines of events and metrics could be lost"),
}


def look_at_folder(folder: Path, environ: Mapping[str, str], *, other_machines: bool) -> list[Finding]:
    """What there is to say about the folder in which runs are made.

    Everything is tried in a temporary folder in it, which is removed again.

    Args:
        folder: where runs are made; it need not be there yet.
        environ: variables of the process that looks.
        other_machines: whether runs go to machines other than this one.

    Raises:
        LookFailed: the file system does not answer.
    """
    module = "hpctrain.jobs.doctor.folder_probe"
    facts = python_facts(["-m", module, str(folder)], environ, _LIMIT_S)
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
            "Each node has its own files here. Submit from a folder that all nodes share, or give --run-dir.",
        )
    else:
        yield Finding(
            _TOPIC,
            "file system",
            where,
            "note",
            "It looks like a disk of this machine. Unless this machine serves it to the nodes under the same "
            "path, give --run-dir a folder that all share.",
        )
    free = facts["free_bytes"]
    yield Finding(
        _TOPIC,
        "free space",
        f"{free / (1 << 30):.1f} GiB",
        "ok" if free >= _LITTLE_BYTES else "note",
        "" if free >= _LITTLE_BYTES else "Checkpoints need room: make some, or give --run-dir another place.",
    )


def _abilities(facts: dict[str, Any]) -> Iterator[Finding]:
    if "write" in facts:
        yield Finding(
            _TOPIC,
            "writing",
            f"refused: {facts['write']}",
            "problem",
            "Submit from a folder that is yours, or give --run-dir.",
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
                f"Take another file system for runs (--run-dir): here {otherwise}.",
            )
        elif key == "lock" and (
            lax := options & {"localflock", "nolock", "local_lock=all", "local_lock=flock"}
        ):
            yield Finding(
                _TOPIC,
                name,
                f"holds on one machine only (mounted with {', '.join(sorted(lax))})",
                "note",
                "Submit a run again from the machine that it was submitted from.",
            )
        else:
            yield Finding(_TOPIC, name, "works")
    ahead_s = facts["clock_ahead_s"]
    if abs(ahead_s) > _CLOCK_TOLERANCE_S:
        yield Finding(
            _TOPIC,
            "clock",
            f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's",
            "note",
            "Times in logs of different machines may not compare. Have the clocks set (NTP).",
        )
    else:
        yield Finding(_TOPIC, "clock", f"agrees with this machine's within {_CLOCK_TOLERANCE_S:g} s")
