"""Likely causes of a difference, from the facts that both runs recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

#: Facts of an environment, in the order of the output, with their names for the user.
_FACTS = {
    "args": "arguments of the script",
    "torch": "PyTorch",
    "hpctrain": "hpctrain",
    "python": "Python",
    "gpu": "GPU model",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "cpu": "CPU model",
    "world_size": "number of ranks",
    "threads_per_rank": "threads per rank",
    "deterministic_algorithms": "deterministic algorithms of PyTorch",
}
_ABSENT = object()


def compare_environments(
    recorded: Iterable[Mapping[str, Any]], here: Collection[Mapping[str, Any]]
) -> list[str]:
    """Return a sentence per fact that differs from the record: code, settings, versions, devices.

    Args:
        recorded: environments of the recorded attempts.
        here: environments of the verification, by part. Each recorded one is compared with the most similar.
    """
    found: dict[str, None] = {}
    for one in recorded:
        differences = min((list(_compare(one, other)) for other in here or [{}]), key=len)
        found |= dict.fromkeys(differences)
    return list(found)


def _compare(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    code, own = recorded.get("code", {}), here.get("code", {})
    if isinstance(code, Mapping) and isinstance(own, Mapping):
        for file in code:
            if file in own and code[file] != own[file]:
                yield f"code: {file} has changed (checksum {code[file]} in the record, {own[file]} here)"
            elif file not in own:
                yield f"code: {file} was imported in the recorded run, but not here"
    settings, others = recorded.get("settings", {}), here.get("settings", {})
    if isinstance(settings, Mapping) and isinstance(others, Mapping):
        for name in settings:
            # The verification has its own run folder.
            if name != "run_dir" and settings[name] != others.get(name):
                yield f"setting {name}: {settings[name]!r} in the record, {others.get(name)!r} here"
    for name, title in _FACTS.items():
        values = recorded.get(name, _ABSENT), here.get(name, _ABSENT)
        # Earlier versions did not record all facts.
        if _ABSENT not in values and values[0] != values[1]:
            theirs, own_value = (str(value) or "none" for value in values)
            yield f"{title}: {theirs} in the record, {own_value} here"
