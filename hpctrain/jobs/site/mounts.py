"""Which file system a path lies on, and whether other hosts see it, too."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")

#: Types whose files every host can have mounted. Those of FUSE are named after the dot.
_SHARED = re.compile(
    r"(?:fuse\.)?(?:nfs4?|lustre|gpfs|beegfs|ceph|wekafs|panfs|cifs|smb3|afs|pvfs2|orangefs|glusterfs|sshfs|"
    r"mfs|moosefs|juicefs|dfuse|daos|quobyte|9p|virtiofs|vast|gfs2|ocfs2|s3fs|gcsfuse|blobfuse2?)"
)
#: Folders that every node has for itself, whatever else it shares.
_PER_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    source: str
    point: str
    type: str
    options: tuple[str, ...]

    @property
    def is_shared(self) -> bool:
        """Whether it is of a type that several hosts can have at once."""
        return _SHARED.fullmatch(self.type) is not None


def mount_of(path: str | os.PathLike[str], table: Path = _MOUNTS) -> Mount | None:
    """The file system that `path` lies on; None where the kernel has no table of them."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    wanted = os.path.realpath(path)
    found = None
    # The last of two on the same point hides the other.
    for line in lines:
        words = [_ESCAPE.sub(lambda match: chr(int(match[1], 8)), word) for word in line.split(" ")]
        if len(words) < 4:
            continue
        source, point, kind, options = words[:4]
        under = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if under and (found is None or len(point) >= len(found.point)):
            found = Mount(source, point, kind, tuple(options.split(",")))
    return found


def is_per_node(path: str | os.PathLike[str]) -> bool:
    """Whether other nodes have something else at this path: in /tmp and its like, unless that is shared."""
    real = os.path.realpath(path)
    if not any(real == folder or real.startswith(f"{folder}/") for folder in _PER_NODE):
        return False
    mount = mount_of(real)
    return mount is None or not mount.is_shared
