"""Pack of the Python environment: one file, which a shared file system reads faster than many."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import xxhash

from hpctrain.files import make_folder
from hpctrain.runtime.staging.local_copy import StagingFailed, copy_tree, list_contents, remove

#: Base environments that are part of the operating system.
_SYSTEM = ("/usr", "/")
#: Folders of the base environment that a virtual environment does not use.
_UNUSED = frozenset({"site-packages", "test", "__pycache__"})
#: Age in seconds at which an unused pack is removed.
_MAX_AGE_S = 30 * 86400.0


def pack_environment(packs: Path, folder: Path) -> Path:
    """Return the pack of this process's environment in `packs`; create it, if the environment has changed.

    Args:
        packs: folder on the shared file system.
        folder: folder on the local disk for temporary files.

    Raises:
        OSError: a file cannot be read or written.
        StagingFailed: tar failed.
    """
    environment = {"venv": Path(sys.prefix)}
    contents = {"venv": list_contents(Path(sys.prefix))}
    if sys.base_prefix not in (sys.prefix, *_SYSTEM):
        environment["base"] = base = Path(sys.base_prefix)
        uses_packages = any(Path(path).is_relative_to(base) and "site-packages" in path for path in sys.path)
        contents["base"] = list_contents(base, () if uses_packages else _UNUSED)
    key = xxhash.xxh3_128()
    for name, path in environment.items():
        key.update(f"{path} {contents[name].fingerprint} ".encode())
    pack = packs / f"{key.hexdigest()}.tar"
    make_folder(packs, private=True)
    with suppress(FileNotFoundError):
        os.utime(pack)
        return pack
    for old in packs.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > _MAX_AGE_S:
                old.unlink()
    copies, temporary = folder / ".pack.part", packs / f".{pack.name}.{os.uname().nodename}.{os.getpid()}"
    remove(copies)
    try:
        for name, path in environment.items():
            copy_tree(path, copies / name, contents[name])
        _link_interpreter(copies, is_packed="base" in environment)
        done = subprocess.run(
            ["tar", "--create", f"--file={temporary}", f"--directory={copies}", *environment],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StagingFailed(f"cannot write {str(pack)!r}: {done.stderr.strip()}")
        os.rename(temporary, pack)
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
        end = len(content) if path.name == "pyvenv.cfg" else content.find(b"\n")
        if end > 0 and (content.startswith(b"#!") or path.name == "pyvenv.cfg"):
            changed = content[:end]
            for old, new in moved.items():
                changed = changed.replace(os.fsencode(f"{old}/"), os.fsencode(f"{new}/"))
            path.write_bytes(changed + content[end:])
