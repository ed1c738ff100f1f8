"""An existing sandbox: its state, loss and return of a node, and removal."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.sandbox import commands, teardown
from hpctrain.sandbox.daemons import Daemon, belongs_to_sandbox, daemons
from hpctrain.sandbox.layout import SandboxLayout, SandboxSize, folder_of
from hpctrain.sandbox.processes import kill_all
from hpctrain.sandbox.requirements import SEARCH_PATH

#: States in which a node accepts or runs jobs. A trailing `*` means that its slurmd does not respond.
_READY = {"idle", "mixed", "allocated", "completing", "planned"}


@dataclass(frozen=True)
class Sandbox:
    """A Slurm cluster on this machine."""

    plan: SandboxLayout

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def shape(self) -> SandboxSize:
        return self.plan.shape

    @property
    def nodes(self) -> list[str]:
        return self.plan.nodes

    @property
    def conf(self) -> Path:
        return self.plan.conf

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that make Slurm's commands use this sandbox."""
        variables = {"SLURM_CONF": str(self.conf)}
        if self.shape.slurm:
            variables["PATH"] = f"{self.plan.commands}:{os.environ.get('PATH', SEARCH_PATH)}"
        return variables

    def daemons(self) -> dict[str, int | None]:
        """Return the pid of each daemon, or None if it is not running."""
        running = processes()
        return {
            daemon.label: next((process.pid for process in running if daemon.is_process(process)), None)
            for daemon in daemons(self.plan)
        }

    def node_states(self) -> dict[str, str]:
        """Return the state of each node as Slurm prints it, such as `idle`, `allocated` or `down*`.

        Raises:
            SchedulerError: the controller does not respond.
        """
        return commands.node_states(self.plan)

    def start(self, limit_s: float = 60.0) -> None:
        """Start the daemons that are not running, and wait until all nodes accept jobs.

        Raises:
            SchedulerError: a daemon exited, or `limit_s` seconds have passed; the message contains the end of
                its log.
        """
        deadline = time.monotonic() + limit_s
        pids = self.daemons()
        for daemon in daemons(self.plan):
            if pids[daemon.label] is None:
                daemon.start()
        while trouble := self._trouble():
            if time.monotonic() > deadline:
                raise SchedulerError(f"Sandbox {self.name} is not ready after {limit_s:.0f} s: {trouble}")
            time.sleep(0.1)

    def down(self) -> None:
        """Remove the sandbox and all its files."""
        teardown.down(self.name)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd and all processes of the node, like a power failure.

        Slurm detects this after some seconds, and considers the node healthy until then.
        """
        self._slurmd(node)

        def on_node(process: ProcessInfo) -> bool:
            return belongs_to_sandbox(self.plan.folder, process, node)

        # Slurm 26.05 overwrites the environment of slurmstepd, the parent of a job's processes.
        parents = {process.parent for process in processes() if on_node(process)}
        kill_all(
            lambda process: on_node(process) or (process.pid in parents and "slurmstepd" in process.argv[0]),
            f"node {node}",
        )

    def start_node(self, node: str, limit_s: float = 30.0) -> None:
        """Start the slurmd of a node that was killed, and wait until Slurm accepts the node.

        Raises:
            SchedulerError: the node was not accepted within `limit_s` seconds.
        """
        slurmd = self._slurmd(node)
        if self.daemons()[slurmd.label] is not None:
            return
        before = self._started_at(node)
        time.sleep(max(0.0, before + 1 - time.time()))  # Slurm's start times have a resolution of one second
        slurmd.start()
        deadline = time.monotonic() + limit_s
        while (state := self.node_states()[node]) not in _READY or self._started_at(node) == before:
            if time.monotonic() > deadline:
                raise SchedulerError(
                    f"Sandbox {self.name}: node {node} is not ready {limit_s:.0f} s after its slurmd started "
                    f"(state: {state}){slurmd.log_tail()}"
                )
            time.sleep(0.1)

    def _trouble(self) -> str | None:
        """Return the reason if a node does not accept jobs, otherwise None.

        Raises:
            SchedulerError: a daemon has exited, so that waiting is useless.
        """
        pids = self.daemons()
        all_daemons = daemons(self.plan)
        for daemon in all_daemons:
            if pids[daemon.label] is None:
                raise SchedulerError(f"Sandbox {self.name}: {daemon.label} exited{daemon.log_tail()}")
        try:
            states = self.node_states()
        except SchedulerError as error:
            controller = next(daemon for daemon in all_daemons if daemon.label == "slurmctld")
            return f"{error}{controller.log_tail()}"
        for daemon in all_daemons:
            state = states.get(daemon.node or "", "unknown")
            if daemon.node and state not in _READY:
                return f"node {daemon.node} is {state}{daemon.log_tail()}"
        if self.shape.accounting and not commands.is_registered(self.plan):
            return "the controller has not registered with slurmdbd"
        return None

    def _slurmd(self, node: str) -> Daemon:
        for daemon in daemons(self.plan):
            if daemon.node == node:
                return daemon
        raise SpecError(f"Sandbox {self.name} has no node {node!r}. Its nodes are {', '.join(self.nodes)}.")

    def _started_at(self, node: str) -> float:
        """Return the start time of the slurmd that last registered, in seconds since the epoch."""
        words = commands.run_command(self.plan, "scontrol", "--oneliner", "show", "node", node).split()
        text = next(word for word in words if word.startswith("SlurmdStartTime=")).partition("=")[2]
        return 0.0 if text == "None" else datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def find(name: str = "default") -> Sandbox | None:
    """Return the sandbox of that name, if it exists; its health is not checked."""
    plan = SandboxLayout.load(folder_of(name))
    return None if plan is None else Sandbox(plan)
