"""Record the calls of processes that change files below a folder, with strace, for `helpers.crash_states`."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from helpers import fork_server
from helpers.crash_states import Call, Disk
from helpers.waiting import deadline_in

_TRACED = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,fsync,fdatasync,"
    "mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,sendfile,"
    "copy_file_range,splice,mmap"
)
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_UNFINISHED = re.compile(r"(\d+) +(\w+\(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
#: A file descriptor with its path, a string, or a number or name.
_ARGUMENT = re.compile(r'(?:AT_FDCWD|\d+)<([^>]*)>|"([^"]*)"|([^,<>"]+)')


def record(folder: Path, processes: Sequence[tuple[Callable[..., None], tuple[object, ...]]]) -> list[Call]:
    """Run functions in new processes, each until its end, and return their calls.

    Fails unless the calls explain the content of `folder`.

    Args:
        folder: the folder that they change.
        processes: the function and the arguments of each process.
    """
    disk = Disk(folder)
    started = [fork_server.start_process(_call_traced, process) for process in processes]
    log = folder.with_name(f"{folder.name}.strace")
    # -y prints the paths of file descriptors, and -xx all strings in hexadecimal digits.
    command = ["strace", "-f", "-y", "-xx", "-s", str(1 << 20), "-o", str(log), "-e", f"trace={_TRACED}"]
    command += [word for process in started for word in ("-p", str(process.pid))]
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            for process in started:
                process.join(120)
            _, errors = strace.communicate(timeout=120)
    finally:
        for process in started:
            process.kill()
    if not log.exists() or "Operation not permitted" in errors:
        pytest.skip(f"strace may not attach here: {errors.strip()}")
    assert [process.exitcode for process in started] == [0] * len(started), errors
    calls = list(_calls(log))
    for call in calls:
        disk.replay(call)
    disk.check_equals_real_folder()
    log.unlink()
    return [call for call in calls if disk.is_changed_by(call)]


def _call_traced(function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    status, deadline = Path("/proc/self/status"), deadline_in(60)
    while "TracerPid:\t0\n" in status.read_text() and time.monotonic() < deadline:
        time.sleep(0.002)
    function(*arguments)


def _calls(log: Path) -> Iterator[Call]:
    """Yield the calls that succeeded, in the order of their ends."""
    unfinished: dict[str, str] = {}
    with open(log) as file:
        for line in file:
            if match := _UNFINISHED.match(line):
                unfinished[match[1]] = match[2]
                continue
            if match := _RESUMED.match(line):
                line = f"{match[1]} {unfinished.pop(match[1])}{match[2]}"
            if (match := _CALL.match(line)) is None or int(match[4]) < 0:
                continue
            # A descriptor counts as a path, and `AT_FDCWD` without one does not occur with -y.
            arguments = [
                _decode(fd) if fd else text.strip() if text else _decode(string)
                for fd, string, text in _ARGUMENT.findall(match[3])
            ]
            yield match[2], [each for each in arguments if each != ""], int(match[4])


def _decode(text: str) -> bytes:
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1")
