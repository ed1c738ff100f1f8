"""Ranks set by submitit's local executor. Its Slurm executor starts a job step, where srun sets them."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.mpi_launchers import RankVariables, ranks_of
from hpctrain.cluster.ranks import Ranks

_NAMES = RankVariables(
    rank="SUBMITIT_LOCAL_GLOBALID",
    world_size="SUBMITIT_LOCAL_NTASKS",
    local_rank="SUBMITIT_LOCAL_LOCALID",
    # The local executor supports only one node.
    local_world_size="SUBMITIT_LOCAL_NTASKS",
)
_JOB = "SUBMITIT_LOCAL_JOB_ID"


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks of this task of a local submitit job, or None outside such a job.

    Raises:
        EnvironmentMismatch: variables contradict each other or are missing.
    """
    if not environ.get(_JOB) or environ.get("SUBMITIT_EXECUTOR", "local") != "local":
        return None
    return ranks_of(environ, "submitit", _NAMES, key=(environ[_JOB], _JOB))
