"""Lay out a sandbox: its size, names, ports, addresses and paths."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import read_json, try_lock, write_atomic
from hpctrain.text import pluralize

#: Parent of the sandbox folders, owned by root. The path is short, because the path of a Unix socket has at
#: most 107 bytes. The folder survives a reboot, like the lines in /etc/hosts, so `down` finds both.
ROOT = Path("/var/lib/hpctrain-sandbox")
#: Search path for daemons and commands, because root's own PATH may lack the sbin folders.
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Below the ephemeral ports of Linux, so that no connection uses a port between the probe and its use.
_PORTS = range(26800, 32700)
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,13}[a-z0-9])?")
_GPU_TYPE = re.compile(r"[A-Za-z]\w*", re.ASCII)
_SETTING = re.compile(r"(?!NodeName=)[A-Za-z]\w*=[^\n]*", re.ASCII | re.IGNORECASE)
#: Description, minimum and maximum of each number.
_LIMITS = {
    "nodes": ("number of nodes", 1, 64),
    "gpus_per_node": ("number of GPUs per node", 0, 16),
    "cpus_per_node": ("number of CPUs per node", 1, 256),
    "preempt_grace_s": ("grace time of preempted jobs in seconds", 0, 3600),
}


@dataclass(frozen=True)
class SandboxSize:
    nodes: int = 4
    gpus_per_node: int = 2
    cpus_per_node: int = 8
    #: Seconds between the SIGTERM of a preemption and the SIGKILL.
    preempt_grace_s: int = 30
    #: GPU type in Slurm, such as `a100`; empty for none.
    gpu_type: str = ""
    #: Lines of `slurm.conf` that replace default lines with the same key or partition, or are added.
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(self.settings))  # JSON only has lists
        for field, (name, low, high) in _LIMITS.items():
            if not low <= (value := getattr(self, field)) <= high:
                raise SpecError(f"The {name} is {value}, but must be between {low} and {high}.")
        if self.gpu_type and not _GPU_TYPE.fullmatch(self.gpu_type):
            raise SpecError(
                f"{self.gpu_type!r} is not a valid GPU type. Use letters, digits and _, starting with a "
                "letter, for example a100."
            )
        for line in self.settings:
            if not _SETTING.fullmatch(line):
                raise SpecError(
                    f"{line!r} is not a valid slurm.conf line for a sandbox. Use the form Key=Value, as "
                    "in JobRequeue=0. To configure nodes, use the other options of this command."
                )

    def __str__(self) -> str:
        kind = f"{self.gpu_type} " if self.gpu_type else ""
        return (
            f"{pluralize(self.nodes, 'node')} × ({pluralize(self.cpus_per_node, 'CPU')},"
            f" {pluralize(self.gpus_per_node, f'{kind}GPU')}), {self.preempt_grace_s} s grace time"
            f"{''.join(f', {line}' for line in self.settings)}"
        )


@dataclass(frozen=True)
class SandboxLayout:
    """Layout of a sandbox. Node k has the address `127.26.<block>.k`; its slurmd listens on `port` + k."""

    folder: Path
    shape: SandboxSize
    port: int
    block: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def nodes(self) -> list[str]:
        return [f"{self.name}-{k}" for k in range(1, self.shape.nodes + 1)]

    @property
    def addresses(self) -> dict[str, str]:
        return {node: f"127.26.{self.block}.{k}" for k, node in enumerate(self.nodes, start=1)}

    @property
    def ports(self) -> range:
        """Ports of the controller and the nodes, and a spare one for slurmdbd."""
        return range(self.port, self.port + _num_ports(self.shape))

    @property
    def conf(self) -> Path:
        return conf_path(self.folder)

    @property
    def devices(self) -> list[Path]:
        """Device files that simulate GPUs; nodes share them, because real nodes also use the same names."""
        return [self.folder / "dev" / f"nvidia{i}" for i in range(self.shape.gpus_per_node)]

    @property
    def munge(self) -> Path:
        return self.folder / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def commands(self) -> Path:
        """Folder of Slurm's commands, if a test uses another version than the installed one."""
        return self.folder / "bin"

    @property
    def launcher(self) -> Path:
        return self.folder / "run-with-slurm"

    @property
    def search_path(self) -> str:
        return f"{self.commands}:{SEARCH_PATH}"

    def save(self) -> None:
        record = {"shape": asdict(self.shape), "port": self.port, "block": self.block}
        write_atomic(self.folder / "sandbox.json", json.dumps(record))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Load the layout of the sandbox in `folder`; None if it is missing or incomplete."""
        try:
            record = read_json(folder / "sandbox.json")
            return cls(folder, SandboxSize(**record["shape"]), record["port"], record["block"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _num_ports(shape: SandboxSize) -> int:
    return 2 + shape.nodes


def allocate(folder: Path, shape: SandboxSize) -> tuple[int, int]:
    """Return an unused port and block for a new sandbox in `folder`. The caller holds the lock."""
    plans = [plan for path in list_folders(folder.parent) if (plan := SandboxLayout.load(path))]
    blocks = set(range(1, 255)) - {plan.block for plan in plans}
    taken = {port for plan in plans for port in plan.ports}
    free_run: list[int] = []
    for port in _PORTS:
        free_run = [*free_run, port] if port not in taken and _is_free(port) else []
        if blocks and len(free_run) == _num_ports(shape):
            return free_run[0], min(blocks)
    raise SchedulerError(
        f"Cannot find {_num_ports(shape)} consecutive free ports between {_PORTS[0]} and {_PORTS[-1]}, or a "
        f"free address block in 127.26.0.0/16. Existing sandboxes on this machine: {len(plans)}. Remove "
        "sandboxes that are no longer needed (hpctrain sandbox down)."
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def folder_of(name: str, root: Path = ROOT) -> Path:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is not a valid sandbox name. Node names are derived from it, so use 1 to 15 lower-case"
            " letters, digits and hyphens. Start with a letter, and do not end with a hyphen."
        )
    return root / name


def conf_path(folder: Path) -> Path:
    """Return the configuration file, whose path identifies the sandbox to Slurm's commands and jobs."""
    return folder / "slurm.conf"


def list_names(root: Path = ROOT) -> list[str]:
    return [folder.name for folder in list_folders(root)]


def list_folders(root: Path = ROOT) -> list[Path]:
    """Return the folders of all sandboxes of this machine, complete or not."""
    try:
        return sorted(entry for entry in root.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []


@contextmanager
def sandbox_lock(root: Path = ROOT, limit_s: float = 180.0) -> Iterator[None]:
    """Hold the lock for creating, starting and removing the sandboxes in `root`."""
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    while (lock := try_lock(root / ".lock")) is None:
        if time.monotonic() > deadline:
            raise SchedulerError(
                f"Another sandbox command has held the lock on {root} for {limit_s:.0f} s."
                " Wait until it has finished, and try again."
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(lock)
