"""Slurm queries about a site. `site_discovery` parses the answers, but is slower to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpctrain.errors import SchedulerError
from hpctrain.slurm.command import SlurmCall
from hpctrain.slurm.config import CONFIG_COMMAND

#: Output of each command, or the error if it failed.
SiteAnswers = Sequence[str | SchedulerError]

# Includes hidden partitions, which users can name. Nodes of a partition with identical values share a line.
# The free-text columns come last.
_NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%T|%N|%G|%f")
_PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")


#: The queries of `begin_query`, and their environment.
_begun: list[tuple[Mapping[str, str], list[SlurmCall]]] = []


def begin_query(environ: Mapping[str, str]) -> Callable[[], None]:
    """Start the queries of the next `query_site`, so that they run during slow imports.

    Returns:
        A function that ends them if they were not used.
    """
    _begun[:] = [(dict(environ), query_site(environ))]
    return _begun.clear


def query_site(environ: Mapping[str, str]) -> list[SlurmCall]:
    """Start the queries for nodes, configuration and partitions, unless `begin_query` has started them.

    The three commands run concurrently.
    """
    if _begun:
        begun_environ, calls = _begun.pop()
        if begun_environ == environ:
            return calls
    return [SlurmCall(command, environ) for command in (_NODES, CONFIG_COMMAND, _PARTITIONS)]
