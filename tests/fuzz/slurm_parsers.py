"""Fuzzing of the parsers of Slurm's output and notations."""

import sys
from collections.abc import Callable
from unittest.mock import patch

from fuzzing import Parser

from hpctrain.cluster import hostlist, slurm_ranks
from hpctrain.errors import EnvironmentMismatch, SchedulerError, SpecError, UserError
from hpctrain.records import submit_successor
from hpctrain.slurm import (
    command,
    config,
    job_array,
    job_queries,
    job_requests,
    node_queries,
    parsing,
    site_facts,
    srun_step,
    states,
)
from hpctrain.slurm.site_facts import SiteConventions

CONFIG = """Configuration data as of 2026-11-22T10:00:00
AccountingStorageEnforce = associations,limits
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = north
Epilog[0]               = /etc/epilog
KillWait                = 30 sec
MaxArraySize            = 1001
MaxMemPerNode           = UNLIMITED
PreemptType             = preempt/partition_prio
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 22.05.8
"""
PARTITION = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=a,b Default=YES QoS=N/A DefaultTime=01:00:00 Hidden=NO "
    "GraceTime=30 MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=1 State=UP OverSubscribe=EXCLUSIVE "
    "PriorityTier=1 PreemptMode=REQUEUE MaxMemPerNode=UNLIMITED"
)
NODES = "gpu|2|8|32000|idle|gpu:a100:4(S:0-1),craynetwork:1|a100,ib"
NODE = """NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUTot=8 CPULoad=0.1
   NodeAddr=10.0.0.1 NodeHostName=n1 Port=17001 Version=22.05.8
   RealMemory=32000 AllocMem=0 FreeMem=1000 Sockets=8 Boards=1 MemSpecLimit=100
   State=IDLE+DRAIN ThreadsPerCore=1

"""
JOB = """JobId=17 ArrayJobId=16 ArrayTaskId=0-3,9%2 JobName=a b
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=PENDING Reason=BeginTime Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   SubmitTime=2026-11-22T10:00:00 EligibleTime=2026-11-22T10:02:00
   WorkDir=/runs/a b

JobId=18 HetJobId=18 HetJobOffset=1 JobName=c
   JobState=RUNNING Reason=None Dependency=(null)

"""
QUEUE = "16\x1f3\x1f0\x1f0\x1f17\x1fRUNNING\x1f1\x1f2026-11-22T10:00:00\x1f/runs/r\x1fNone\x1f\n"
ACCOUNTING = (
    "16_[0-3,9%2]\x1f16\x1fCANCELLED by 1000\x1f2026-11-22T10:00:00\x1f/runs/r\n17\x1f17\x1fFAILED\x1f\x1f\n"
)
FORECAST = (
    "sbatch: Job 5 to start at 2026-11-22T10:00:00 using 8 processors on nodes n[1-2] in partition gpu\n"
)


def of_answer(
    function: Callable[..., object], examples: list[str], *arguments: object, fails: bool = False
) -> Parser:
    """A parser of Slurm's answer to the command that it sends."""

    def call(text: str) -> object:
        with patch.object(sys.modules[function.__module__], "run_slurm", return_value=text):
            return function(*arguments, {})

    return Parser(function, examples, (SchedulerError,) if fails else (), call)


PARSERS = [
    Parser(parsing.parse_pairs, [PARTITION, "JobId=17 Nodes=n1"]),
    Parser(parsing.is_null, ["UNLIMITED", "(null)"]),
    Parser(parsing.parse_number, ["30 sec", "UNLIMITED", "4"]),
    Parser(parsing.parse_time_limit, ["2-00:00:00", "UNLIMITED", "30:00"]),
    Parser(parsing.parse_size_mib, ["4000", "32G", "1.5T", "100K"]),
    Parser(parsing.parse_names, ["a,b", "(null)"]),
    Parser(parsing.parse_names_or_all, ["ALL", "a,b"]),
    Parser(parsing.parse_gpus, ["gpu:4", "gpu:a100:4(S:0-1),gpu:a100_3g.40gb:2(IDX:0-1)", "gpu:no_consume"]),
    Parser(parsing.parse_timestamp, ["2026-11-22T10:00:00", "Unknown"]),
    Parser(parsing.parse_duration, ["2-12:30:15", "90", "12:30", "unlimited"], (SpecError,)),
    # Each of the ranges may contain 10,000 tasks, even if they overlap.
    Parser(job_array.JobArray.parse, ["0-19%4", "1,3,5-7", "0-30:10"], (SpecError,), most_bytes=1 << 10),
    Parser(config.parse_config, [CONFIG]),
    Parser(states.parse_job_state, ["RUNNING", "CANCELLED by 1000", "CANCELLED+"]),
    Parser(node_queries.parse_nodes, [NODE * 2]),
    Parser(site_facts.parse_partition, [PARTITION]),
    Parser(
        site_facts.parse_site,
        [f"{NODES}\n{PARTITION}\n", CONFIG],
        call=lambda text: site_facts.parse_site([text] * 3, SiteConventions()),
    ),
    Parser(site_facts._parse_nodes, [f"{NODES}\n" * 2]),
    Parser(job_queries._parse_records, [JOB]),
    of_answer(job_queries.query_squeue, [QUEUE * 2], ["17"]),
    of_answer(job_queries.query_sacct, [ACCOUNTING], ["17"]),
    of_answer(job_queries.query_scontrol, [JOB], ["17"], fails=True),
    of_answer(job_queries.query_job, [JOB], "17", fails=True),
    of_answer(
        command.list_rank_steps,
        ["17.batch batch\n17.0 hpctrain-ranks-0\n17.1 hpctrain-reserve-1\n17.2 hpctrain-chaos\n"],
        ["17"],
    ),
    of_answer(command.find_step, ["17.batch batch\n17.0 hpctrain-ranks-0\n"], "17", "hpctrain-ranks-0"),
    Parser(command._words, ["sbatch: error: no\nsbatch: fatal: never\n"]),
    of_answer(job_requests.submit_job, ["sbatch: lua: hello\n17;north\n", "17\n"], [], fails=True),
    Parser(
        submit_successor.replace_dependency,
        ["afterok:17(unfulfilled),afterany:18", "afterok:17?afterany:17"],
        call=lambda text: submit_successor.replace_dependency(text, "17", "18"),
    ),
    Parser(
        srun_step.parse_task_report,
        [
            "srun: error: n1: tasks 0-2,5: Exited with exit code 75\n",
            "srun: error: n1: task 3: Aborted (core dumped)",
        ],
    ),
    Parser(job_requests._when, ["2026-11-22T10:00:00", "2026-11-22T10:00:00Z", "Unknown"]),
    Parser(job_requests._START.search, [FORECAST]),
    Parser(hostlist.expand_hostlist, ["n[01-03,7],gpu-a[1-2]b", "rack[1-2]node[1-16]"], (UserError,)),
    Parser(
        hostlist.compress_hostlist,
        ["n1,n2,n3,x", "rack1node1,rack2node1"],
        (UserError,),
        lambda text: hostlist.compress_hostlist(text.split(",")),
    ),
    Parser(
        slurm_ranks.parse_tasks_per_node, ["4(x2),3", "1"], (EnvironmentMismatch,), slow=[("4", "(x#),3", "")]
    ),
]
