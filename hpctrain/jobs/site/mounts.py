"""The file system of a path, and if other hosts share it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")

#: File system types that several hosts can mount. FUSE types have their name after the dot.
_SHARED = re.compile(
    r"(?:fuse\.)?(?:nfs4?|lustre|gpfs|beegfs|ceph|wekafs|panfs|cifs|smb3|afs|pvfs2|orangefs|glusterfs|sshfs|"
    r"mfs|moosefs|juicefs|dfuse|daos|quobyte|9p|virtiofs|vast|gfs2|ocfs2|s3fs|gcsfuse|blobfuse2?)"
)
#: Folders that are local to each node on any cluster.
_PER_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    source: str
    point: str
    type: str
    options: tuple[str, ...]

    @property
    def is_shared(self) -> bool:
        """True if several hosts can mount this type at once."""
        return _SHARED.fullmatch(self.type) is not None


def find_mount(path: str | os.PathLike[str], table: Path = _MOUNTS) -> Mount | None:
    """Return the file system of `path`; None if the kernel provides no mount table."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    wanted = os.path.realpath(path)
    found = None
    # If two file systems are mounted on the same point, the last hides the first.
    for line in lines:
        words = [_ESCAPE.sub(lambda match: chr(int(match[1], 8)), word) for word in line.split(" ")]
        if len(words) < 4:
            continue
        source, point, kind, options = words[:4]
        under = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if under and (found is None or len(point) >= len(found.point)):
            found = Mount(source, point, kind, tuple(options.split(",")))
    return found


def is_node_local(path: str | os.PathLike[str]) -> bool:
    """Return true if the path is local to each node, such as in an unshared /tmp."""
    real = os.path.realpath(path)
    if not any(real == folder or real.startswith(f"{folder}/") for folder in _PER_NODE):
        return False
    mount = find_mount(real)
    return mount is None or not mount.is_shared
