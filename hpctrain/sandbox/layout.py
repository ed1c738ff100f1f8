"""Layout of a sandbox: its size, names, ports, addresses and paths."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.files import read_json, write_atomic
from hpctrain.sandbox.requirements import SEARCH_PATH
from hpctrain.text import pluralize

#: Parent of the sandbox folders, owned by root. The path is short, because the path of a Unix socket has at
#: most 107 bytes. The folder survives a reboot, like the lines in /etc/hosts, so `down` finds both.
ROOT = Path("/var/lib/hpctrain-sandbox")

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
    """Size and options of a sandbox.

    Raises:
        SpecError: a value is out of range or invalid.
    """

    nodes: int = 4
    gpus_per_node: int = 2
    cpus_per_node: int = 8
    #: Seconds between the SIGTERM of a preemption and the SIGKILL.
    preempt_grace_s: int = 30
    #: Run slurmdbd and a database, so that `sacct` works.
    accounting: bool = False
    #: GPU type in Slurm, such as `a100`; empty for none.
    gpu_type: str = ""
    #: Lines of `slurm.conf` that replace default lines or are added.
    settings: tuple[str, ...] = ()
    #: Slurm version of a test, such as `26.05`; empty for the installed one.
    slurm: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(self.settings))  # JSON only has lists
        for field, (what, low, high) in _LIMITS.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise SpecError(f"The {what} is {value}, but must be between {low} and {high}.")
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
            f"{', accounting' if self.accounting else ''}{f', Slurm {self.slurm}' if self.slurm else ''}"
            f"{''.join(f', {line}' for line in self.settings)}"
        )

    @property
    def num_ports(self) -> int:
        """One port for the controller, one per node, and one for slurmdbd if there is accounting."""
        return 1 + self.nodes + self.accounting


@dataclass(frozen=True)
class SandboxLayout:
    """Layout of one sandbox. Only `save` and `load` access files.

    The controller listens on `port`. Node k, counted from 1, has the name `NAME-k` and the address
    `127.26.<block>.k`; its slurmd listens on `port` + k. Slurmdbd has the port after the last node's.
    """

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
    def ports(self) -> range:
        """All ports of this sandbox, the controller's first."""
        return range(self.port, self.port + self.shape.num_ports)

    @property
    def node_ports(self) -> range:
        return range(self.port + 1, self.port + 1 + self.shape.nodes)

    @property
    def slurmdbd_port(self) -> int:
        """Port of slurmdbd, used only with accounting."""
        return self.node_ports[-1] + 1

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each node."""
        return {node: f"127.26.{self.block}.{k}" for k, node in enumerate(self.nodes, start=1)}

    @property
    def conf(self) -> Path:
        return conf_path(self.folder)

    @property
    def gres_conf(self) -> Path:
        return self.folder / "gres.conf"

    @property
    def devices(self) -> list[Path]:
        """Device files that simulate GPUs; nodes share them, because real nodes also use the same names."""
        return [self.folder / "dev" / f"nvidia{i}" for i in range(self.shape.gpus_per_node)]

    @property
    def munge(self) -> Path:
        """Folder of munged: key, socket, log."""
        return self.folder / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def state(self) -> Path:
        """State folder of the controller."""
        return self.folder / "state"

    @property
    def commands(self) -> Path:
        """Folder of Slurm's commands, if the sandbox has another version than the installed one."""
        return self.folder / "bin"

    @property
    def launcher(self) -> Path:
        """Script that runs a command with the sandbox's Slurm version, if that is not the installed one."""
        return self.folder / "run-with-slurm"

    @property
    def search_path(self) -> str:
        """Search path with Slurm's commands."""
        return f"{self.commands}:/usr/sbin:/usr/bin:/sbin:/bin" if self.shape.slurm else SEARCH_PATH

    @property
    def spool(self) -> Path:
        """Parent of one folder per node with the scripts and sockets of its jobs."""
        return self.folder / "spool"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def accounting(self) -> Path:
        """Folder of MariaDB and slurmdbd: data, socket, logs."""
        return self.folder / "accounting"

    @property
    def database_socket(self) -> Path:
        return self.accounting / "socket"

    @property
    def slurmdbd_conf(self) -> Path:
        """Slurmdbd searches only the folder of `slurm.conf`."""
        return self.conf.with_name("slurmdbd.conf")

    @property
    def slurmdbd_log(self) -> Path:
        return self.accounting / "slurmdbd.log"

    def save(self) -> None:
        record = {"shape": asdict(self.shape), "port": self.port, "block": self.block}
        write_atomic(_file(self.folder), json.dumps(record))

    @classmethod
    def load(cls, folder: Path) -> SandboxLayout | None:
        """Load the layout of the sandbox in `folder`; None if it is missing or incomplete."""
        try:
            record = read_json(_file(folder))
            return cls(folder, SandboxSize(**record["shape"]), record["port"], record["block"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def folder_of(name: str, root: Path = ROOT) -> Path:
    """Return the folder of the sandbox `name`.

    Raises:
        SpecError: the name is not valid for node names and socket paths.
    """
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
    """Return the names of all sandboxes of this machine, complete or not."""
    return [folder.name for folder in list_folders(root)]


def list_folders(root: Path = ROOT) -> list[Path]:
    """Return the folders of all sandboxes of this machine, complete or not."""
    try:
        return sorted(entry for entry in root.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []


def _file(folder: Path) -> Path:
    return folder / "sandbox.json"
