"""Checks for contradictory directives, before sbatch or the queue reports them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from hpctrain.errors import SpecError, UserError

#: Pairs of which Slurm takes at most one. Of the last pair it would silently take the later one.
_EITHER = (*combinations(("mem", "mem-per-cpu", "mem-per-gpu"), 2), ("exclusive", "oversubscribe"))


def check_directive_conflicts(directives: Mapping[str, str], *, nodes: int, gpus_per_node: int) -> None:
    """Check that no directives contradict each other or the size of the run.

    Raises:
        SpecError: two of them do.
    """
    for one, other in _EITHER:
        if one in directives and other in directives:
            raise SpecError(
                f"{_said(one, directives)} and {_said(other, directives)} exclude each other in Slurm. "
                "Leave one of them out."
            )
    if "mem-per-gpu" in directives and gpus_per_node == 0:
        raise SpecError(
            f"{_said('mem-per-gpu', directives)} is given for a run without GPUs (--gpus-per-node 0). "
            "Give --mem or --mem-per-cpu instead."
        )
    if any(part.partition(":")[0] == "gpu" for part in directives.get("gres", "").split(",")):
        raise SpecError(
            f"{_said('gres', directives)} names GPUs, of which each rank has to have one. "
            "Give them with --gpus-per-node, and all other resources with --gres."
        )
    _check_nodes(directives, nodes)


def _check_nodes(directives: Mapping[str, str], nodes: int) -> None:
    wanted, unwanted = _hosts("nodelist", directives), _hosts("exclude", directives)
    if both := [host for host in wanted if host in unwanted]:
        raise SpecError(
            f"{_said('nodelist', directives)} asks for the node {both[0]}, but "
            f"{_said('exclude', directives)} excludes it. Take it out of one of them."
        )
    if len(wanted) > nodes:
        raise SpecError(
            f"{_said('nodelist', directives)} names {len(wanted)} nodes, all of which the job would have to "
            f"get, but {nodes} are asked for (--nodes). Give --nodes {len(wanted)}, or name fewer."
        )


def _hosts(key: str, directives: Mapping[str, str]) -> dict[str, None]:
    """Return the nodes that a directive names, in order; none if it names a node file (sbatch(1))."""
    value = directives.get(key, "")
    if not value or "/" in value:
        return {}
    from hpctrain.cluster import expand_hostlist

    try:
        return dict.fromkeys(expand_hostlist(value))
    except UserError as error:
        raise SpecError(f"--{key} is no list of nodes: {error}") from error


def _said(key: str, directives: Mapping[str, str]) -> str:
    value = directives[key]
    return f"--{key} {value}" if value else f"--{key}"
