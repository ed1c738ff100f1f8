"""What Slurm is asked about a site. The answers are read in `read`, which takes longer to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import SchedulerError
from hpctrain.jobs.slurm_command import Question

#: What the commands said, or the errors of those that failed.
Answers = Sequence[str | SchedulerError]

# Of hidden partitions, too, for one may be named by whoever knows it. Nodes of a partition that are alike in
# all of this are one line. The free texts stand last.
_NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%T|%N|%G|%f")
_CONFIG = ("scontrol", "show", "config")
_PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")


def ask_site(environ: Mapping[str, str]) -> list[Question]:
    """Ask for the nodes, the configuration and the partitions.

    Three commands run side by side, so that this takes as long as the slowest of them.
    """
    return [Question(command, environ) for command in (_NODES, _CONFIG, _PARTITIONS)]
