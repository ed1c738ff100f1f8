"""Stage the files for the ranks of this node: `python -P -m hpctrain.runtime.staging.stage_node PLAN`.

PLAN is a JSON object: the `folder` of the copies, the `sources` by name, and the folder of `packs`, which is
null if the Python environment is not staged. One process per node runs this program.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import xxhash

from hpctrain.cluster.parent_death import die_with_supervisor
from hpctrain.errors import EXIT_CONTINUE, StagingError
from hpctrain.files import make_folder, make_private_folder, try_lock, write_atomic
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, STAGED_ENVIRONMENT, RunDir
from hpctrain.runtime.staging.local_copy import copy_contents, list_contents, remove, run_program, stage
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS

#: Between checks for another process that stages. The supervisor limits the time.
_POLL_INTERVAL_S = 0.2
#: Folders of the base environment that a virtual environment does not use; the last two are those of conda.
_UNUSED = frozenset({"site-packages", "test", "envs", "pkgs"})
#: Age in seconds at which an unused pack is removed.
_MAX_AGE_S = 30 * 86400.0


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    """Copy everything, and write the result to the run folder. Return the exit code: 1 after an error."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    plan, node = json.loads(argv[0]), int(environ["SLURM_NODEID"])
    run, attempt = RunDir(Path(environ[RUN_DIR_VARIABLE])), int(environ[ATTEMPT_VARIABLE])
    folder, result = Path(plan["folder"]), run.staging_result(attempt, node)
    staged_environment = folder / STAGED_ENVIRONMENT
    staged, error, name = {}, None, "files"
    try:
        make_private_folder(folder, "TMPDIR (--setup)")
        if plan["packs"] is not None:
            name, chosen = "the Python environment", run.staged_environment(environ["SLURM_JOB_ID"])
            pack = _choose_pack(chosen, Path(plan["packs"]), folder, is_first=node == 0)
        # Several nodes may share a disk.
        while (lock := try_lock(folder / ".lock")) is None:
            time.sleep(_POLL_INTERVAL_S)
        if plan["packs"] is not None:
            staged[name] = stage(pack, staged_environment, finish=partial(relocate, staged_environment))
        for name, source in plan["sources"].items():
            staged[name] = stage(Path(source), folder / name)
        os.close(lock)
    except (OSError, StagingError) as failure:
        error = f"cannot stage {name}: {re.sub(r'^.Errno [0-9]+. ', '', str(failure))}"
    make_folder(result.parent)
    write_atomic(result, json.dumps({"staged": staged, "error": error}) + "\n", durable=False)
    return int(error is not None)


def _choose_pack(chosen: Path, packs: Path, folder: Path, *, is_first: bool) -> Path:
    """Return the pack that the first node has recorded in `chosen`, for all attempts of this job."""
    while True:
        with suppress(OSError):
            if (pack := Path(chosen.read_text())).exists():
                return pack
        if is_first:
            pack = pack_environment(packs, folder)
            make_folder(chosen.parent)
            write_atomic(chosen, str(pack), durable=False)
        else:
            time.sleep(_POLL_INTERVAL_S)


def pack_environment(packs: Path, folder: Path) -> Path:
    """Return the pack of this process's environment: one file, which shared file systems read fast.

    The pack is created in the shared folder `packs` if the environment has changed; temporary files are in
    the local `folder`.
    """
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    environment = {"venv": list_contents(prefix)}
    if base != prefix and not base.is_relative_to("/usr"):
        package_folders = (Path(path).parents for path in sys.path if "site-packages" in path)
        # The environment itself may be inside its base.
        uses_packages = any(base in parents and prefix not in parents for parents in package_folders)
        environment["base"] = list_contents(base, () if uses_packages else _UNUSED)
    key = " ".join(f"{contents.path} {contents.fingerprint}" for contents in environment.values())
    pack = packs / f"{xxhash.xxh3_128_hexdigest(os.fsencode(key))}.tar"
    make_folder(packs, private=True)
    if (owner := packs.lstat().st_uid) != (user := os.geteuid()):
        raise PermissionError(
            f"{packs} belongs to user {owner}, not to user {user}. Choose another --run-dir"
        )
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
    """Replace the paths of the original environment in a copy, which will move to `target`."""
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


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Incomplete copies have other names. The supervisor removes them with the folder.
    os._exit(EXIT_CONTINUE)


if __name__ == "__main__":
    die_with_supervisor(os.environ)
    raise SystemExit(main(sys.argv[1:], os.environ))
