"""Checks for contradictory directives, before sbatch or the queue reports them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from hpctrain.errors import SpecError, UserError

#: Mutually exclusive pairs. For the last pair, Slurm would silently use the later option.
_EITHER = (*combinations(("mem", "mem-per-cpu", "mem-per-gpu"), 2), ("exclusive", "oversubscribe"))


def check_directive_conflicts(directives: Mapping[str, str], *, nodes: int, gpus_per_node: int) -> None:
    """Check that no directives contradict each other or the size of the run.

    Raises:
        SpecError: two directives contradict each other.
    """
    for one, other in _EITHER:
        if one in directives and other in directives:
            raise SpecError(
                f"{_as_option(one, directives)} and {_as_option(other, directives)} are mutually exclusive "
                "in Slurm. Remove one of them."
            )
    if "mem-per-gpu" in directives and gpus_per_node == 0:
        raise SpecError(
            f"{_as_option('mem-per-gpu', directives)} requires GPUs, but the run has none (--gpus-per-node "
            "0). Use --mem or --mem-per-cpu instead."
        )
    if any(part.partition(":")[0] == "gpu" for part in directives.get("gres", "").split(",")):
        raise SpecError(
            f"{_as_option('gres', directives)} requests GPUs. "
            "Use --gpus-per-node for GPUs, and --gres for other resources."
        )
    _check_nodes(directives, nodes)


def _check_nodes(directives: Mapping[str, str], nodes: int) -> None:
    wanted, unwanted = _hosts("nodelist", directives), _hosts("exclude", directives)
    if both := [host for host in wanted if host in unwanted]:
        raise SpecError(
            f"{_as_option('nodelist', directives)} requests node {both[0]}, but "
            f"{_as_option('exclude', directives)} excludes this node. Remove the node from one of the "
            "options."
        )
    if len(wanted) > nodes:
        raise SpecError(
            f"{_as_option('nodelist', directives)} names {len(wanted)} nodes, and all of them are required, "
            f"but the job requests only {nodes} (--nodes plus --spare-nodes). Request more nodes, or name "
            "fewer."
        )


def _hosts(key: str, directives: Mapping[str, str]) -> dict[str, None]:
    """Return the nodes in a directive, in order; empty for the name of a node file (sbatch(1))."""
    value = directives.get(key, "")
    if not value or "/" in value:
        return {}
    from hpctrain.cluster import expand_hostlist

    try:
        return dict.fromkeys(expand_hostlist(value))
    except UserError as error:
        raise SpecError(f"Invalid --{key}: {error}") from error


def _as_option(key: str, directives: Mapping[str, str]) -> str:
    value = directives[key]
    return f"--{key} {value}" if value else f"--{key}"
