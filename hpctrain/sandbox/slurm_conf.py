"""Write `slurm.conf` and `gres.conf` of a sandbox."""

from __future__ import annotations

import re

from hpctrain.sandbox.layout import SandboxLayout

_SLURM_CONF = """\
# Written by `hpctrain sandbox up`; `man slurm.conf` explains each line.
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge_socket}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
SlurmctldPidFile={folder}/state/slurmctld.pid
SlurmdPidFile={folder}/state/slurmd-%n.pid

# All nodes run on this machine: they may have more CPUs than the machine, and use no cgroups.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none

# CPUs and GPUs are allocated individually; several jobs share a node. Jobs start within a second.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_min_interval=0

# A job in `urgent` preempts a job in `preemptible`, which is requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
JobFileAppend=1

# A lost node is detected within seconds, and returns to service with its slurmd.
SlurmdTimeout=3
# Seconds from SIGTERM to SIGKILL when a job is cancelled or reaches its limit (Slurm's default).
KillWait=30
MessageTimeout=10
InactiveLimit=0
MinJobAge=300
ReturnToService=2

{gpus}\
NodeName={name}-[{k}] NodeHostname={host} NodeAddr=127.26.{block}.[{k}] Port=[{ports}] \
CPUs={cpus} RealMemory={memory_mib}{gres} State=UNKNOWN
PartitionName=preemptible Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} \
MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=100 PreemptMode=OFF MaxTime=INFINITE State=UP
"""

_GRES_CONF = """\
AutoDetect=off
NodeName={name}-[{k}] Name=gpu {type}File={devices}
"""


def slurm_conf(plan: SandboxLayout, host: str, memory_mib: int) -> str:
    """Return the `slurm.conf` of a sandbox whose nodes have `memory_mib` each, on this `host`."""
    gpus, kind = plan.shape.gpus_per_node, plan.shape.gpu_type
    text = _SLURM_CONF.format(
        name=plan.name,
        host=host,
        port=plan.port,
        munge_socket=plan.munge_socket,
        folder=plan.folder,
        logs=plan.logs,
        gpus="GresTypes=gpu\n" if gpus else "",
        k=_span(1, plan.shape.nodes),
        block=plan.block,
        ports=_span(plan.port + 1, plan.port + plan.shape.nodes),
        cpus=plan.shape.cpus_per_node,
        memory_mib=memory_mib,
        gres=f" Gres=gpu:{f'{kind}:' if kind else ''}{gpus}" if gpus else "",
        grace=plan.shape.preempt_grace_s,
    )
    for line in plan.shape.settings:
        text = with_setting(text, line)
    return text


def gres_conf(plan: SandboxLayout) -> str:
    if not plan.devices:
        return ""
    files = plan.devices[0].with_name(f"nvidia[{_span(0, len(plan.devices) - 1)}]")
    kind = f"Type={plan.shape.gpu_type} " if plan.shape.gpu_type else ""
    return _GRES_CONF.format(name=plan.name, k=_span(1, plan.shape.nodes), type=kind, devices=files)


def with_setting(text: str, line: str) -> str:
    """Replace the line for the same key or partition, or append the line."""
    key = line.partition("=")[0]
    head = rf"{re.escape(line.split()[0])}\s" if key.lower() == "partitionname" else f"{key}="
    ours = re.compile(rf"^{head}.*$", re.MULTILINE | re.IGNORECASE)
    changed, number = ours.subn(lambda _: line, text)
    return changed if number else f"{text}{line}\n"


def _span(start: int, end: int) -> str:
    return str(start) if start == end else f"{start}-{end}"
