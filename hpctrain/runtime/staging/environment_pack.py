"""Pack of the Python environment: one file, which a shared file system reads faster than many."""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

import xxhash

from hpctrain.files import make_folder
from hpctrain.runtime.staging.local_copy import copy_contents, list_contents, remove, run_program

#: Folders of the base environment that a virtual environment does not use; the last two are those of conda.
_UNUSED = frozenset({"site-packages", "test", "envs", "pkgs"})
#: Age in seconds at which an unused pack is removed.
_MAX_AGE_S = 30 * 86400.0


def pack_environment(packs: Path, folder: Path) -> Path:
    """Return the pack of this process's environment in `packs`; create it, if the environment has changed.

    Args:
        packs: folder on the shared file system.
        folder: folder on the local disk for temporary files.

    Raises:
        OSError: a file cannot be read or written, or another user owns `packs`.
        StagingError: the environment changed, or tar failed.
    """
    environment, base = {"venv": list_contents(Path(sys.prefix))}, Path(sys.base_prefix)
    if sys.base_prefix != sys.prefix and not base.is_relative_to("/usr"):
        inside = (Path(path).parents for path in sys.path if "site-packages" in path)
        # The environment itself may be inside its base.
        uses_packages = any(base in parents and Path(sys.prefix) not in parents for parents in inside)
        environment["base"] = list_contents(base, () if uses_packages else _UNUSED)
    key = " ".join(f"{contents.path} {contents.fingerprint}" for contents in environment.values())
    pack = packs / f"{xxhash.xxh3_128_hexdigest(os.fsencode(key))}.tar"
    make_folder(packs, private=True)
    if (owner := packs.lstat().st_uid) != os.geteuid():
        problem = f"{packs} belongs to user {owner}, not to user {os.geteuid()}"
        raise PermissionError(f"{problem}. Choose another --run-dir")
    with suppress(FileNotFoundError):
        # Other jobs may be copying the pack, so its modification time must not change.
        os.utime(pack, ns=(time.time_ns(), pack.stat().st_mtime_ns))
        return pack
    for old in packs.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_atime > _MAX_AGE_S:
                old.unlink()
    copies, temporary = folder / ".pack.part", packs / f".{pack.name}.{os.uname().nodename}.{os.getpid()}"
    remove(copies)
    copies.mkdir()
    try:
        for name, contents in environment.items():
            copy_contents(contents, copies / name)
        _link_interpreter(copies, is_packed="base" in environment)
        command = ["tar", "--create", f"--file={temporary}", f"--directory={copies}", *environment]
        run_program(command, f"write {str(pack)!r}")
        # Another job may have created the pack, and its nodes may be copying it.
        with suppress(FileExistsError):
            os.link(temporary, pack)
    finally:
        remove(copies, temporary)
    return pack


def _link_interpreter(copies: Path, *, is_packed: bool) -> None:
    """Replace the interpreters of a virtual environment by links to that of its base, as `venv` creates."""
    base = os.path.realpath(sys.base_prefix)
    for path in Path(sys.prefix, "bin").iterdir():
        real = os.path.realpath(path)
        if path.is_symlink() and sys.prefix != sys.base_prefix and real.startswith(f"{base}/"):
            copy = copies / "venv/bin" / path.name
            copy.unlink()
            copy.symlink_to(f"../../base/{os.path.relpath(real, base)}" if is_packed else real)


def relocate(target: Path, copy: Path) -> None:
    """Replace the paths of the original environment in the configuration and the scripts of a copy.

    Args:
        target: final path of the copy.
        copy: its current path.
    """
    moved = {sys.prefix: target / "venv"}
    if (copy / "base").exists():
        moved[sys.base_prefix] = target / "base"
    for path in (copy / "venv/pyvenv.cfg", *(copy / "venv/bin").iterdir()):
        content = b"" if path.is_symlink() or not path.is_file() else path.read_bytes()
        is_script = content.startswith(b"#!")
        if is_script or (content and path.name == "pyvenv.cfg"):
            # pip writes a long path to the second line, after #!/bin/sh.
            head = b"\n".join(content.split(b"\n", 2)[:2]) if is_script else content
            tail = content[len(head) :]
            for old, new in moved.items():
                head = head.replace(os.fsencode(f"{old}/"), os.fsencode(f"{new}/"))
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
            path.write_bytes(head + tail)
