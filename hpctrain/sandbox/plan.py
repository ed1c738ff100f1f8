"""What a sandbox looks like: its shape, its names, ports and addresses, and every path of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.files import write_atomic

#: Holds one folder a sandbox. Root's and short, for a Unix socket's path has at most 107 bytes; it outlives
#: a reboot because the lines in the hosts file do too, and `down` has to find both.
ROOT = Path("/var/lib/hpctrain-sandbox")

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,13}[a-z0-9])?")
_GPU_TYPE = re.compile(r"[A-Za-z]\w*", re.ASCII)
_SETTING = re.compile(r"(?!NodeName=)[A-Za-z]\w*=[^\n]*", re.ASCII | re.IGNORECASE)
#: What each number of a shape counts, the least and the most of it.
_LIMITS = {
    "nodes": ("nodes", 1, 64),
    "gpus_per_node": ("GPUs a node", 0, 16),
    "cpus_per_node": ("CPUs a node", 1, 256),
    "preempt_grace_s": ("seconds of grace before a preemption kills", 0, 3600),
}


@dataclass(frozen=True)
class Shape:
    """How big a sandbox is.

    Raises:
        SpecError: a number is outside of what a sandbox can have.
    """

    nodes: int = 4
    gpus_per_node: int = 2
    cpus_per_node: int = 8
    #: Seconds between the SIGTERM of a preemption and the SIGKILL.
    preempt_grace_s: int = 30
    #: Whether slurmdbd and a database keep records, so that `sacct` works.
    accounting: bool = False
    #: What Slurm calls the GPUs, such as `a100`; empty for no name.
    gpu_type: str = ""
    #: Lines of `slurm.conf` that take the place of ours, or are added to them.
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(self.settings))  # JSON has lists alone
        for field, (unit, low, high) in _LIMITS.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise SpecError(
                    f"a sandbox has {low} to {high} {unit}, but {value} was asked for: choose another number"
                )
        if self.gpu_type and not _GPU_TYPE.fullmatch(self.gpu_type):
            raise SpecError(
                f"{self.gpu_type!r} cannot be a type of GPUs: take letters, digits and _, as in a100"
            )
        for line in self.settings:
            if not _SETTING.fullmatch(line):
                raise SpecError(
                    f"{line!r} is no line for a sandbox's slurm.conf: write Key=Value, as in JobRequeue=0;"
                    " nodes have options of their own"
                )

    def __str__(self) -> str:
        kind = f" {self.gpu_type}" if self.gpu_type else ""
        return (
            f"{self.nodes} node{'s' if self.nodes > 1 else ''} × ({self.cpus_per_node} CPUs,"
            f" {self.gpus_per_node}{kind} GPUs), {self.preempt_grace_s} s grace"
            f"{', accounting' if self.accounting else ''}{''.join(f', {line}' for line in self.settings)}"
        )

    @property
    def num_ports(self) -> int:
        """One for the controller, one a node, and one for slurmdbd where there is accounting."""
        return 1 + self.nodes + self.accounting


@dataclass(frozen=True)
class Plan:
    """One sandbox as it was laid out: nothing here starts, reads or writes but `save` and `load`.

    The controller listens on `port`. Node k, counted from 1, is called `NAME-k` and has the address
    `127.26.<block>.k`; its slurmd listens on `port` + k. Slurmdbd has the port after the last node's.
    """

    folder: Path
    shape: Shape
    port: int
    block: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def nodes(self) -> list[str]:
        return [f"{self.name}-{k}" for k in range(1, self.shape.nodes + 1)]

    @property
    def ports(self) -> range:
        """All ports of this sandbox, the controller's first."""
        return range(self.port, self.port + self.shape.num_ports)

    @property
    def node_ports(self) -> range:
        return range(self.port + 1, self.port + 1 + self.shape.nodes)

    @property
    def slurmdbd_port(self) -> int:
        """Listened on only where there is accounting."""
        return self.node_ports[-1] + 1

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each node."""
        return {node: f"127.26.{self.block}.{k}" for k, node in enumerate(self.nodes, start=1)}

    @property
    def conf(self) -> Path:
        return conf_of(self.folder)

    @property
    def gres_conf(self) -> Path:
        return self.folder / "gres.conf"

    @property
    def devices(self) -> list[Path]:
        """The files that stand for GPUs; nodes share them, for they are called alike on real nodes too."""
        return [self.folder / "dev" / f"nvidia{i}" for i in range(self.shape.gpus_per_node)]

    @property
    def munge(self) -> Path:
        """Belongs to munged: key, socket, log."""
        return self.folder / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def state(self) -> Path:
        """Where the controller keeps its jobs."""
        return self.folder / "state"

    @property
    def spool(self) -> Path:
        """Holds a folder a node, with the scripts and sockets of its jobs."""
        return self.folder / "spool"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def accounting(self) -> Path:
        """Belongs to MariaDB and slurmdbd: data, socket, logs."""
        return self.folder / "accounting"

    @property
    def database_socket(self) -> Path:
        return self.accounting / "socket"

    @property
    def slurmdbd_conf(self) -> Path:
        """Slurmdbd looks for it beside `slurm.conf`, and nowhere else."""
        return self.conf.with_name("slurmdbd.conf")

    @property
    def slurmdbd_log(self) -> Path:
        return self.accounting / "slurmdbd.log"

    def save(self) -> None:
        record = {"shape": asdict(self.shape), "port": self.port, "block": self.block}
        write_atomic(_file(self.folder), json.dumps(record))

    @classmethod
    def load(cls, folder: Path) -> Plan | None:
        """The plan of the sandbox in `folder`; None where there is none, or only a part of one."""
        try:
            record = json.loads(_file(folder).read_text(encoding="utf-8"))
            return cls(folder, Shape(**record["shape"]), record["port"], record["block"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def folder_of(name: str, root: Path = ROOT) -> Path:
    """The folder of the sandbox `name`.

    Raises:
        SpecError: node names and socket paths cannot be made of this name.
    """
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} cannot be a sandbox's name, since its nodes are called after it: take 1 to 15"
            " lower-case letters, digits and inner hyphens, a letter first"
        )
    return root / name


def conf_of(folder: Path) -> Path:
    """The configuration by whose path Slurm's commands and the jobs of a sandbox know it."""
    return folder / "slurm.conf"


def names(root: Path = ROOT) -> list[str]:
    """The names of all sandboxes of this machine, whole or not."""
    return [folder.name for folder in existing(root)]


def existing(root: Path = ROOT) -> list[Path]:
    """The folders of all sandboxes of this machine, whole or not."""
    try:
        return sorted(entry for entry in root.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []


def _file(folder: Path) -> Path:
    return folder / "sandbox.json"
