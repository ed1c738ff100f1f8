"""Start, repair and remove a Slurm cluster on this machine, and lose or return its nodes."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import stat
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError, SpecError, UserError
from hpctrain.sandbox.daemons import (
    MUNGE_USER,
    Daemon,
    belongs_to_sandbox,
    daemons,
    kill_all,
    with_descendants,
)
from hpctrain.sandbox.etc_hosts import HOSTS, add_hosts, remove_hosts
from hpctrain.sandbox.layout import (
    SEARCH_PATH,
    SandboxLayout,
    SandboxSize,
    allocate,
    folder_of,
    sandbox_lock,
)
from hpctrain.sandbox.slurm_conf import gres_conf, slurm_conf
from hpctrain.slurm.command import run_slurm

#: Major number for local use, without a driver. Slurm requires a character device per GPU, but never opens
#: it. Control groups distinguish the devices by their minor numbers.
_DEVICE_MAJOR = 120
#: Maximum seconds for jobs to end before their processes are killed.
_CANCEL_LIMIT_S = 8.0
_COMMAND_LIMIT_S = 20.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")

#: States in which a node accepts or runs jobs. A trailing `*` means that its slurmd does not respond.
_READY = {"idle", "mixed", "allocated", "completing", "planned"}


@dataclass(frozen=True)
class Sandbox(SandboxLayout):
    """A Slurm cluster on this machine."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that make Slurm's commands use this sandbox."""
        variables = {"SLURM_CONF": str(self.conf)}
        if self.commands.exists():
            variables["PATH"] = f"{self.commands}:{os.environ.get('PATH', SEARCH_PATH)}"
        return variables

    def prepare(self) -> None:
        """Change the files of a new sandbox before its daemons start, in a subclass."""

    def list_daemons(self) -> list[Daemon]:
        return daemons(self)

    def daemons(self) -> dict[str, int | None]:
        """Return the pid of each daemon, or None if it is not running."""
        running = processes()
        return {
            daemon.label: next((process.pid for process in running if process.argv == daemon.argv), None)
            for daemon in self.list_daemons()
        }

    def node_states(self) -> dict[str, str]:
        """Return the state of each node as Slurm prints it, such as `idle`, `allocated` or `down*`."""
        sinfo = ("sinfo", "--noheader", "--Node", "--partition=preemptible", "--format=%N %T")
        cells = self._run(*sinfo).split()
        return dict(zip(cells[::2], cells[1::2], strict=True))

    def start(self, limit_s: float = 60.0) -> None:
        """Start the daemons that are not running, and wait until all nodes accept jobs."""
        deadline = time.monotonic() + limit_s
        pids = self.daemons()
        for daemon in self.list_daemons():
            if pids[daemon.label] is None:
                daemon.start()
        while trouble := self._trouble():
            if time.monotonic() > deadline:
                raise SchedulerError(f"Sandbox {self.name} is not ready after {limit_s:.0f} s: {trouble}")
            time.sleep(0.1)

    def down(self) -> None:
        down(self.name)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node, like a power failure, which Slurm detects after some seconds."""
        self._slurmd(node)

        def on_node(process: ProcessInfo) -> bool:
            return belongs_to_sandbox(self.folder, process, node)

        # Slurm 26.05 overwrites the environment of slurmstepd, the parent of a job's processes.
        parents = {process.parent for process in processes() if on_node(process)}
        kill_all(
            lambda process: on_node(process) or (process.pid in parents and "slurmstepd" in process.argv[0]),
            f"node {node}",
        )

    def start_node(self, node: str, limit_s: float = 30.0) -> None:
        """Start the slurmd of a node that was killed, and wait until Slurm accepts the node."""
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
        """Return the reason if a node does not accept jobs, otherwise None; raise if a daemon has exited."""
        pids, all_daemons = self.daemons(), self.list_daemons()
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
        return None

    def _run(self, *argv: str) -> str:
        """Return the output of a Slurm command that uses the sandbox; its times are UTC."""
        environ = {"PATH": self.search_path, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
        try:
            return run_slurm(argv, {**environ, "SLURM_CONF": str(self.conf)}, timeout_s=_COMMAND_LIMIT_S)
        except SchedulerError as error:
            raise SchedulerError(f"Sandbox {self.name}: {error}") from None

    def cancel_jobs(self) -> None:
        list_jobs = ("squeue", "--noheader", "--all", "--format=%A")
        if jobs := self._run(*list_jobs).split():
            self._run("scancel", "--quiet", *jobs)
        deadline = time.monotonic() + _CANCEL_LIMIT_S
        while jobs and time.monotonic() < deadline:
            time.sleep(0.1)
            jobs = self._run(*list_jobs).split()

    def _slurmd(self, node: str) -> Daemon:
        for daemon in daemons(self):
            if daemon.node == node:
                return daemon
        raise SpecError(f"Sandbox {self.name} has no node {node!r}. Its nodes are {', '.join(self.nodes)}.")

    def _started_at(self, node: str) -> float:
        """Return the start time of the slurmd that last registered, in seconds since the epoch."""
        pairs = self._run("scontrol", "--oneliner", "show", "node", node).split()
        text = next(pair for pair in pairs if pair.startswith("SlurmdStartTime=")).partition("=")[2]
        return 0.0 if text == "None" else datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def find(name: str = "default") -> Sandbox | None:
    """Return the sandbox of that name, if it exists; its health is not checked."""
    return Sandbox.load(folder_of(name))


def up(
    name: str = "default", *, kind: type[Sandbox] = Sandbox, limit_s: float = 60.0, **size: Any
) -> Sandbox:
    """Start a sandbox with the fields of `SandboxSize`, and wait until all its nodes accept jobs.

    An existing sandbox of the same size is kept with its jobs; exited daemons are restarted. A new sandbox
    that is not up within `limit_s` seconds is removed again.
    """
    shape, folder = SandboxSize(**size), folder_of(name)
    check_requirements()
    with sandbox_lock():
        if (sandbox := kind.load(folder)) is not None:
            if sandbox.shape != shape:
                raise SpecError(
                    f"Sandbox {name} already exists with {sandbox.shape}, but {shape} was requested. Remove "
                    f"the existing sandbox (`hpctrain sandbox down --name {name}`), or use another --name."
                )
            return _start(sandbox, limit_s)
        remove(folder)
        try:
            return _start(create_folder(folder, shape, kind), limit_s)
        except BaseException:
            remove(folder, came_up=False)
            raise


def create_folder(folder: Path, shape: SandboxSize, kind: type[Sandbox] = Sandbox) -> Sandbox:
    """Create the files that the daemons of a new sandbox read."""
    folder.mkdir()
    plan = kind(folder, shape, *allocate(folder, shape))
    for path in (plan.munge, plan.logs, *(folder / name for name in ("state", "spool", "dev"))):
        path.mkdir()
    host = socket.gethostname().partition(".")[0]
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    plan.conf.write_text(slurm_conf(plan, host, memory_mib), encoding="utf-8")
    plan.conf.with_name("gres.conf").write_text(gres_conf(plan), encoding="utf-8")
    (plan.munge / "key").write_bytes(secrets.token_bytes(128))
    # Every user of the machine may use the sandbox, regardless of the umask; only the key is secret.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (plan.munge / "key").chmod(0o400)
    for path in (plan.munge, plan.munge / "key"):
        shutil.chown(path, MUNGE_USER, MUNGE_USER)
    plan.prepare()
    try:
        for number, device in enumerate(plan.devices):
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(_DEVICE_MAJOR, number))
    except OSError as error:
        raise UserError(
            f"Cannot create the device file {device}, which simulates a GPU: {error.strerror}. If "
            "this is a container, add the capability CAP_MKNOD. Otherwise, use --gpus-per-node 0."
        ) from error
    # Written last, so that a saved layout implies a complete sandbox.
    plan.save()
    return plan


def _start(sandbox: Sandbox, limit_s: float) -> Sandbox:
    try:
        add_hosts(sandbox.name, sandbox.addresses)
    except OSError as error:
        raise UserError(
            f"Cannot add the node names to {HOSTS}: {error.strerror}. Slurm must be able to "
            "resolve these names. Make the file writable."
        ) from error
    sandbox.start(limit_s)
    return sandbox


def down(name: str = "default") -> bool:
    """Remove a sandbox with its jobs and processes, even a crashed one. Return true if it existed."""
    folder = folder_of(name)
    check_requirements()
    with sandbox_lock():
        was_there = folder.exists()
        remove(folder)
    return was_there


def remove(folder: Path, *, came_up: bool = True) -> None:
    """Remove the sandbox in `folder`, even an incomplete one. The caller holds the lock."""

    def ours(process: ProcessInfo) -> bool:
        return belongs_to_sandbox(folder, process)

    if any(process.pid == os.getpid() for process in with_descendants(ours, processes())):
        raise UserError(
            f"This process runs in a job of sandbox {folder.name}, so it would be killed with the "
            "sandbox. Run this command outside the sandbox."
        )
    sandbox = Sandbox.load(folder) if came_up else None
    if sandbox is not None and sandbox.daemons()["slurmctld"] is not None:
        # A hanging controller must not prevent the removal.
        with suppress(SchedulerError):
            sandbox.cancel_jobs()
    kill_all(ours, f"sandbox {folder.name}")
    remove_hosts(folder.name)
    if folder.exists():
        shutil.rmtree(folder)


def installed_version(search_path: str = SEARCH_PATH) -> str:
    """Return the version of the installed Slurm, such as `22.05.8`; empty if there is none."""
    program = shutil.which("slurmctld", path=search_path)
    if program is None:
        return ""
    return subprocess.run([program, "-V"], capture_output=True, text=True, timeout=20).stdout.split()[-1]


def check_requirements(
    system: str = platform.system(), uid: int | None = None, search_path: str = SEARCH_PATH
) -> None:
    """Check that a sandbox can be started, or raise UserError."""
    if system != "Linux":
        raise UserError(
            f"A sandbox requires Linux, but this machine runs {system}. Use a Linux container or virtual "
            "machine. A sandbox is not needed for `hpctrain submit --backend local`."
        )
    if missing := [program for program in _PROGRAMS if not shutil.which(program, path=search_path)]:
        raise UserError(
            f"A sandbox requires Slurm, but these programs are missing: {', '.join(missing)}. On Debian and "
            "Ubuntu, run `apt-get install slurm-wlm munge`."
        )
    if (uid := os.geteuid() if uid is None else uid) != 0:
        raise UserError(
            f"A sandbox requires root, because it creates device files and adds its nodes to /etc/hosts. "
            f"This process runs as user {uid}. Try again with sudo."
        )
