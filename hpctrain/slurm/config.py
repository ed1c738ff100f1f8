"""Read the configuration of a Slurm cluster (`scontrol show config`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from hpctrain.errors import SchedulerError
from hpctrain.slurm.command import SlurmCall, run_slurm
from hpctrain.slurm.parsing import is_null, parse_names, parse_number

#: Output of each command of `query_site`, or the error if it failed.
SiteAnswers = Sequence[str | SchedulerError]

# Includes hidden partitions, which users can name. Nodes of a partition with identical values share a line.
# The free-text columns come last.
_NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%T|%G|%f")
_CONFIG = ("scontrol", "show", "config")
_PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")

_LINE = re.compile(r"^(\S+)\s*= ?(.*)$", re.MULTILINE)
#: Newer versions number them, as in `Epilog[0]`.
_EPILOG = re.compile(r"Epilog(Slurmctld)?(\[\d+\])?")
# YES is the name of ANY before 16.05.
_ENFORCING: Mapping[str, Literal["ANY", "ALL"]] = {"ANY": "ANY", "ALL": "ALL", "YES": "ANY"}


class SlurmConfig(Struct, frozen=True, kw_only=True):
    cluster: str = ""
    version: str = ""
    accounting: bool = False
    """True if slurmdbd keeps records, so that `sacct` works."""
    enforced: tuple[str, ...] = ()
    """AccountingStorageEnforce: associations, limits, qos, …"""
    job_requeue: bool = True
    """True if jobs are requeued by default."""
    preempt_type: str = "none"
    """Preemption criterion: none, partition_prio or qos."""
    preempt_mode: str = "OFF"
    expedites_requeues: bool = False
    """True if `--requeue=expedite` starts a requeued job without a delay (Slurm 25.11 and newer)."""
    kill_wait_s: float = 30.0
    """Seconds from SIGTERM to SIGKILL at the end of a job."""
    max_array_size: int = 1001
    """Upper bound (exclusive) of the task indices of a job array."""
    max_mem_per_node_mib: int | None = None
    def_mem_per_node_mib: int | None = None
    def_mem_per_cpu_mib: int | None = None
    select: str = ""
    """The node selection plugin. linear allocates complete nodes."""
    hands_out_memory: bool = False
    """True if memory is a consumable resource like CPUs (SelectTypeParameters)."""
    enforces_limits: Literal["NO", "ANY", "ALL"] = "NO"
    """EnforcePartLimits: a job must fit in any or all of its partitions to be queued.

    With NO, a job may pend forever, unless a QOS lifts the limit; with the other values, no QOS can lift the
    limit.
    """
    chooses_partition: bool = False
    """True if a submit plugin may change jobs, including their partition."""
    min_job_age_s: float = 300.0
    """Seconds for which the controller remembers an ended job."""
    slurmd_port: int = 6818
    """Port of each node's slurmd, unless the node has another one."""
    has_epilog: bool = False
    """True if a program of the site runs after each job, which then ends later."""


#: Time limit in seconds of the first query: a busy controller may take longer than ten seconds.
_PROBE_TIMEOUT_S = 30.0


def query_site(environ: Mapping[str, str]) -> list[SlurmCall]:
    """Start the queries for nodes, configuration and partitions, which run concurrently."""
    probe = SlurmCall(_NODES, environ, timeout_s=_PROBE_TIMEOUT_S)
    return [probe, *(SlurmCall(command, environ) for command in (_CONFIG, _PARTITIONS))]


def query_config(environ: Mapping[str, str]) -> SlurmConfig:
    return parse_config(run_slurm(_CONFIG, environ))


def parse_config(output: str) -> SlurmConfig:
    unknown = SlurmConfig()
    values: dict[str, str] = {key: value.strip() for key, value in _LINE.findall(output)}

    def value(key: str, default: str = "") -> str:
        return values.get(key, default)

    def duration_s(key: str, default: float) -> float:
        number = parse_number(value(key))
        return default if number is None else float(number)

    plugins = [value("JobSubmitPlugins"), value("CliFilterPlugins")]
    return SlurmConfig(
        cluster=value("ClusterName"),
        version=value("SLURM_VERSION"),
        accounting=value("AccountingStorageType").endswith("slurmdbd"),
        enforced=parse_names(value("AccountingStorageEnforce")),
        job_requeue=value("JobRequeue", "1") != "0",
        preempt_type=value("PreemptType", "none").rpartition("/")[2],
        preempt_mode=value("PreemptMode", "OFF"),
        expedites_requeues="enable_expedited_requeue" in value("SlurmctldParameters"),
        kill_wait_s=duration_s("KillWait", unknown.kill_wait_s),
        max_array_size=parse_number(value("MaxArraySize")) or unknown.max_array_size,
        max_mem_per_node_mib=parse_number(value("MaxMemPerNode")),
        def_mem_per_node_mib=parse_number(value("DefMemPerNode")),
        def_mem_per_cpu_mib=parse_number(value("DefMemPerCPU")),
        select=value("SelectType").rpartition("/")[2],
        hands_out_memory="MEMORY" in value("SelectTypeParameters").upper(),
        enforces_limits=_ENFORCING.get(value("EnforcePartLimits").upper(), "NO"),
        chooses_partition=not all(map(is_null, plugins)),
        min_job_age_s=duration_s("MinJobAge", 0.0) or unknown.min_job_age_s,
        # It may be a range for several daemons on one host.
        slurmd_port=parse_number(value("SlurmdPort").partition("-")[0]) or unknown.slurmd_port,
        has_epilog=any(_EPILOG.fullmatch(key) and not is_null(value(key)) for key in values),
    )
