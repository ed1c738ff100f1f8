"""Find the lost, draining and free nodes of a Slurm job, and release or exclude nodes.

Slurm marks a node down after `SlurmdTimeout`, five minutes by default, and then ends the job. Until then, a
step that needs the node does not start. The supervisor therefore contacts the slurmd of each node. If the
slurmd does not respond, no step can run on that node.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hpctrain import system
from hpctrain.cluster import expand_hostlist
from hpctrain.errors import SchedulerError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.records.successor import JobChanges, can_start, excluded_nodes
from hpctrain.rundir import RunDir
from hpctrain.slurm.command import list_rank_steps, run_slurm
from hpctrain.slurm.config import query_config
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.job_requests import shrink_job, signal_ranks, signal_steps, update_job
from hpctrain.slurm.node_queries import NodeRecord, query_nodes

log = logging.getLogger(__name__)

#: A slurmd responds in milliseconds; a host that is off does not respond at all.
_ANSWER_S = 3.0
_AT_ONCE = 64
#: Running work continues in DRAIN and FAILING (sinfo(1), NODE STATE CODES).
#: A requested reboot or power-down waits for the end of the job.
_DOWN = re.compile(r"\bDOWN\b|POWERED_DOWN|POWERING_DOWN|REBOOT_ISSUED")
_DRAINING = re.compile(r"DRAIN|FAIL")

#: Variables with the memory of a job, in MB; the option of sbatch and the field of scontrol for each.
_MEMORY_OPTIONS = {
    "SLURM_MEM_PER_NODE": ("mem", "MinMemoryNode"),
    "SLURM_MEM_PER_CPU": ("mem-per-cpu", "MinMemoryCPU"),
}
#: Time limit for killed tasks to exit; usually shorter if the nodes are up.
_STEPS_END_S = 30.0
#: Time limit for Slurm to list the steps. Without the controller, srun cannot start a step either.
_STEPS_LISTED_S = 300.0
#: Time limit for Slurm to accept changes of a requeued job.
_UPDATE_LIMIT_S = 15.0
_POLL_INTERVAL_S = 0.5


class SlurmNodes:
    """Nodes of the job. Methods raise SchedulerError if Slurm refuses or does not answer."""

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self._run, self._spec, self._batch_environ = run, spec, environ
        self._job_id, self._environ = own_job_id(environ), strip_job_env(environ)
        self.own_host = environ.get("SLURMD_NODENAME", "")

    def lost(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the nodes of the job that can no longer run processes, with the reason."""
        nodes = query_nodes(hosts, self._environ)
        if any(node.port is None for node in nodes):
            port = query_config(self._environ).slurmd_port
            nodes = [replace(node, port=port) if node.port is None else node for node in nodes]
        with system.ThreadPoolExecutor(min(_AT_ONCE, max(1, len(nodes)))) as pool:
            troubles = pool.map(node_trouble, nodes)
            lost = {node.name: trouble for node, trouble in zip(nodes, troubles, strict=True) if trouble}
        lost.pop(self.own_host, None)  # this process runs there
        return lost

    def draining(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the nodes that will be taken out of service when this job releases them, with the reason."""
        return {
            node.name: f"Slurm reports the state {node.state}" + (f" ({node.reason})" if node.reason else "")
            for node in query_nodes(hosts, self._environ)
            if _DRAINING.search(node.state) and "DOWN" not in node.state
        }

    def shrink_to(self, hosts: Sequence[str]) -> None:
        """Release all other nodes of the job, so that their loss does not end the job."""
        shrink_job(self._job_id, hosts, self._environ)

    def can_reallocate(self, excluded_hosts: Collection[str]) -> bool:
        return can_start(self._run, self._spec, JobChanges(excluded_hosts), self._batch_environ)

    def num_free(self, excluded_hosts: Collection[str]) -> int:
        """Return the number of additional nodes that are free and not claimed by waiting jobs."""
        partition = self._batch_environ.get("SLURM_JOB_PARTITION", "")
        waiting = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--format=%i"]
        if run_slurm(waiting, self._environ).strip():
            return 0
        idle = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--states=idle", "--format=%N"]
        excluded = expand_hostlist(self._spec.directives.get("exclude", ""))
        idle_hosts = set(run_slurm(idle, self._environ).split())
        return len(idle_hosts.difference(excluded_hosts, excluded))

    def larger_memory(self, hosts: Sequence[str], excluded_hosts: Collection[str]) -> str | None:
        """Return an option of sbatch, such as `mem=96000`, that gives the job more memory on such nodes."""
        environ = self._batch_environ
        option = next(filter(environ.get, _MEMORY_OPTIONS), None)
        if option is None:
            return None
        try:
            node_mib = min(node.memory_mib for node in query_nodes(hosts, self._environ))
        except (SchedulerError, ValueError) as error:
            log.warning("cannot determine the memory of the nodes, so no more memory is requested: %s", error)
            return None
        name, current = _MEMORY_OPTIONS[option][0], int(environ[option])
        cpus = int(environ.get("SLURM_CPUS_ON_NODE", "1")) if option == "SLURM_MEM_PER_CPU" else 1
        larger = min(current * 3 // 2, node_mib // cpus)
        memory = f"{name}={larger}"
        changes = JobChanges(excluded_hosts, memory)
        return memory if larger > current and can_start(self._run, self._spec, changes, environ) else None

    def change_job(self, changes: JobChanges) -> None:
        fields = {}
        if changes.excluded_hosts:
            fields["ExcNodeList"] = excluded_nodes(self._spec, changes.excluded_hosts)
        if changes.memory:
            option, _, value = changes.memory.partition("=")
            fields[dict(_MEMORY_OPTIONS.values())[option]] = value
        deadline = system.monotonic() + _UPDATE_LIMIT_S
        while True:
            refusals = {}
            for name, value in fields.items():
                try:
                    update_job([self._job_id], self._environ, until_killed=True, **{name: value})
                except SchedulerError as error:
                    refusals[name] = str(error)
            if not refusals:
                return
            if system.monotonic() > deadline:
                raise SchedulerError("; ".join(refusals.values()))
            # Slurm may refuse while it still ends the processes of the job.
            fields = {name: fields[name] for name in refusals}
            system.sleep(_POLL_INTERVAL_S)

    def stop_ranks(self) -> None:
        signal_ranks([self._job_id], signal.SIGTERM, self._environ)

    def kill_steps(self) -> None:
        """End the remaining tasks of a killed supervisor of this job. Waits for a bounded time."""
        deadline, is_warned = system.monotonic() + _STEPS_LISTED_S, False
        while system.monotonic() < deadline:
            try:
                if not (steps := list_rank_steps([self._job_id], self._environ)):
                    return
                deadline = min(deadline, system.monotonic() + _STEPS_END_S)
                signal_steps(steps, signal.SIGKILL, self._environ)
            except SchedulerError as error:
                if not is_warned:
                    log.warning("cannot end the ranks of the killed supervisor yet (%s); will retry", error)
                is_warned = True
            system.sleep(_POLL_INTERVAL_S)
        log.warning("could not end all ranks of the killed supervisor, so some may still be running")


def node_trouble(node: NodeRecord) -> str | None:
    """Return the reason why no process can run on a node; None without a known problem."""
    if _DOWN.search(node.state):
        return f"Slurm reports the state {node.state}"
    try:
        system.create_connection((node.address, node.port), timeout=_ANSWER_S).close()
    except (ConnectionRefusedError, ConnectionResetError, TimeoutError) as error:
        return f"slurmd is not responding ({type(error).__name__})"
    except ValueError:
        return None  # An invalid address is not a fault of the node.
    except OSError as error:
        # A name that cannot be resolved is no evidence against the node.
        return None if isinstance(error, socket.gaierror) else f"the node is unreachable ({error.strerror})"
    return None
