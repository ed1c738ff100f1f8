"""Slurm queries about a site. `site_discovery` parses the answers, but is slower to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import SchedulerError
from hpctrain.slurm.command import SlurmCall
from hpctrain.slurm.config import CONFIG_COMMAND

#: Output of each command, or the error if it failed.
SiteAnswers = Sequence[str | SchedulerError]

# Includes hidden partitions, which users can name. Nodes of a partition with identical values share a line.
# The free-text columns come last.
_NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%T|%N|%G|%f")
_PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")


def query_site(environ: Mapping[str, str]) -> list[SlurmCall]:
    """Start the queries for nodes, configuration and partitions.

    The three commands run concurrently.
    """
    return [SlurmCall(command, environ) for command in (_NODES, CONFIG_COMMAND, _PARTITIONS)]
