"""All states of a folder that a power loss can leave, from the recorded calls that changed the folder.

The model assumes no order of writes other than by fsync. It is the weakest file system of the ALICE paper
(Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014), for which no application may rely on
more than POSIX promises:

- After a crash, any subset of the directory operations (create, mkdir, link, unlink, rmdir, rename) before it
  is on disk. Each of them is atomic, also a rename.
- A directory operation depends on the earlier operations on the same entries. An rmdir also depends on all
  operations in the removed directory.
- fsync of a directory persists its earlier operations, and everything that they depend on. fsync of a file
  persists its content, but not its name.
- Of content that was not synced, any prefix is on disk, or any subset of 512-byte blocks. A missing block has
  its old content, or zeros after the old end. An overwritten block is never torn.
- Files do not depend on each other, and content does not depend on names.
"""

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from helpers import fork_server
from helpers.waiting import deadline_in

_BLOCK_BYTES = 512

#: The content of a folder: relative path → content of a file; None for a folder.
Tree = dict[str, bytes | None]
#: A successful system call: its name, arguments (paths and strings as bytes), and result.
Call = tuple[str, list, int]
_Entry = tuple[int, str]


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


@dataclass
class _File:
    """The content of a file: on disk, and after each write since its last sync."""

    synced: bytes = b""
    unsynced: list[bytes] = field(default_factory=list)

    @property
    def newest(self) -> bytes:
        return self.unsynced[-1] if self.unsynced else self.synced

    def contents(self) -> Iterator[bytes]:
        """Yield the regular contents after a crash: each write complete, cut in its middle, or as zeros."""
        old = self.synced
        yield old
        for new in self.unsynced:
            if len(new) > len(old):
                yield new[: (len(old) + len(new)) // 2]
                yield self.synced + bytes(len(new) - len(self.synced))
            yield new
            old = new

    def random_content(self, random: Random) -> bytes:
        if not self.unsynced or random.random() < 0.3:
            return random.choice([self.synced, self.newest])
        new = random.choice(self.unsynced)
        if random.random() < 0.5:  # a prefix
            return new[: random.randint(min(len(self.synced), len(new)), len(new))]
        old = self.synced[: len(new)].ljust(len(new), b"\0")
        blocks = range(0, len(new), _BLOCK_BYTES)
        return b"".join(random.choice((old, new))[at : at + _BLOCK_BYTES] for at in blocks)


@dataclass
class _Change:
    """An operation on directories: the new target of each entry, or None."""

    entries: dict[_Entry, int | None]
    after: frozenset[int]
    """Numbers of the operations that it depends on."""


class Disk:
    """The folder `root`, and its history of calls."""

    def __init__(self, root: Path) -> None:
        """Start with the present content of the folder, which counts as synced."""
        self.root = root
        self._durable: dict[_Entry, int] = {}
        self._newest: dict[_Entry, int] = {}
        self._files: dict[int, _File] = {}
        self._folders = {0}
        self._numbers = itertools.count(1)
        self._changes: dict[int, _Change] = {}
        for path in sorted(root.rglob("*")):
            entry, number = self._entry(path), next(self._numbers)
            self._newest[entry] = self._durable[entry] = number
            if path.is_dir():
                self._folders.add(number)
            else:
                self._files[number] = _File(path.read_bytes())

    def contains(self, path: Path) -> bool:
        return path.is_relative_to(self.root)

    def is_changed_by(self, call: Call) -> bool:
        """True if an argument of the call is in the folder."""
        paths = (Path(os.fsdecode(argument)) for argument in call[1] if isinstance(argument, bytes))
        return any(map(self.contains, paths))

    def replay(self, recorded: Call) -> None:
        """Apply a call. Paths outside of the folder are ignored."""
        call, arguments, result = recorded

        def path(at: int, base: int | None = None) -> Path:
            parent = os.fsdecode(arguments[base]) if base is not None else "/"
            return Path(parent, os.fsdecode(arguments[at]))

        match call:
            case "openat" if "O_CREAT" in arguments[2] or "O_TRUNC" in arguments[2]:
                self._open(path(1, 0), truncates="O_TRUNC" in arguments[2])
            case "write":  # at the end: no product code writes elsewhere without an offset
                self._write(path(0), None, arguments[1][:result])
            case "pwrite64":
                self._write(path(0), int(arguments[-1]), arguments[1][:result])
            case "ftruncate":
                if (number := self._find(path(0))) is not None:
                    size = int(arguments[1])
                    self._put(number, self._files[number].newest[:size].ljust(size, b"\0"))
            case "fsync" | "fdatasync":
                self._sync(path(0))
            case "mkdir":
                if self.contains(path(0)):
                    number = next(self._numbers)
                    self._folders.add(number)
                    self._change({self._entry(path(0)): number})
            case "rename" | "link":
                if self.contains(path(1)):
                    removed = {self._entry(path(0)): None} if call == "rename" else {}
                    self._change({self._entry(path(1)): self._find(path(0)), **removed})
            case "unlink" | "rmdir" | "unlinkat":
                name = path(1, 0) if call == "unlinkat" else path(0)
                if self.contains(name):
                    self._change({self._entry(name): None})
            case "openat":
                pass
            case "mmap" if "MAP_SHARED" not in str(arguments) or "PROT_WRITE" not in str(arguments):
                pass
            case _:
                assert not self.is_changed_by(recorded), recorded

    def _open(self, path: Path, *, truncates: bool) -> None:
        """Create the file unless it exists; if it exists, truncate it on request."""
        number = self._find(path)
        if number is not None and truncates:
            self._put(number, b"")
        elif number is None and self.contains(path):
            number = next(self._numbers)
            self._files[number] = _File()
            self._change({self._entry(path): number})

    def _write(self, path: Path, offset: int | None, data: bytes) -> None:
        if (number := self._find(path)) is not None:
            old = self._files[number].newest
            offset = len(old) if offset is None else offset
            self._put(number, old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :])

    def _sync(self, path: Path) -> None:
        number = 0 if path == self.root else self._find(path)
        if number in self._files:
            self._files[number] = _File(self._files[number].newest)
        elif number is not None:
            inside = [
                change
                for change, entries in self._changes.items()
                if any(folder == number for folder, _ in entries.entries)
            ]
            self._persist(set(inside))

    # The states.

    def newest(self) -> Tree:
        """Return the state without a crash."""
        return self._tree(self._newest, {number: file.newest for number, file in self._files.items()})

    def all_states(self) -> Iterator[Tree]:
        """Yield all states of names after a crash now, each with all regular contents."""
        for names in self._all_names():
            dirty = [number for number in self._reachable(names) if self._files[number].unsynced]
            for contents in itertools.product(*(self._files[number].contents() for number in dirty)):
                yield self._tree(names, dict(zip(dirty, contents, strict=True)))

    def random_state(self, random: Random) -> Tree:
        """Return a random state after a crash now."""
        names, done, share = dict(self._durable), set[int](), random.choice((0.1, 0.5, 0.9, 1.0))
        last = random.choice(list(self._changes)) if self._changes and share == 1.0 else None
        for number, change in self._changes.items():
            if change.after <= done and random.random() < share:
                self._apply(change, names)
                done.add(number)
            if number == last:  # all operations up to one of them, as with a journal
                break
        return self._tree(
            names, {number: self._files[number].random_content(random) for number in self._reachable(names)}
        )

    def check_equals_real_folder(self) -> None:
        """Fail unless the recorded calls explain the present content of the folder."""
        tree: Tree = {
            str(path.relative_to(self.root)): None if path.is_dir() else path.read_bytes()
            for path in self.root.rglob("*")
        }
        expected = self.newest()
        paths = tree.keys() | expected.keys()
        different = sorted(path for path in paths if tree.get(path, 0) != expected.get(path, 0))
        assert not different, f"not recorded completely: {different}"

    def _entry(self, path: Path) -> _Entry:
        parent = 0 if path.parent == self.root else self._find(path.parent)
        assert parent is not None, f"{path.parent} is unknown"
        return parent, path.name

    def _find(self, path: Path) -> int | None:
        number = 0
        if not self.contains(path):
            return None
        for name in path.relative_to(self.root).parts:
            if (found := self._newest.get((number, name))) is None:
                return None
            number = found
        return number

    def _put(self, number: int, content: bytes) -> None:
        self._files[number].unsynced.append(content)

    def _change(self, entries: dict[_Entry, int | None]) -> None:
        keys, removed = set(entries), {self._newest.get(key) for key, new in entries.items() if new is None}
        removed = removed & self._folders if len(entries) == 1 else set()
        after = frozenset(
            number
            for number, change in self._changes.items()
            if keys.intersection(change.entries) or any(at in removed for at, _ in change.entries)
        )
        change = _Change(entries, after)
        self._changes[next(self._numbers)] = change
        self._apply(change, self._newest)

    @staticmethod
    def _apply(change: _Change, names: dict[_Entry, int]) -> None:
        for entry, target in change.entries.items():
            if target is None:
                names.pop(entry, None)
            else:
                names[entry] = target

    def _persist(self, numbers: set[int]) -> None:
        for number in sorted(self._changes, reverse=True):
            if number in numbers:
                numbers |= self._changes[number].after
        for number in sorted(numbers & self._changes.keys()):
            self._apply(self._changes.pop(number), self._durable)
        for change in self._changes.values():
            change.after -= numbers

    def _all_names(self) -> Iterator[dict[_Entry, int]]:
        """Yield the names for each subset of the pending operations that contains its dependencies."""

        def extend(
            rest: list[int], done: frozenset[int], names: dict[_Entry, int]
        ) -> Iterator[dict[_Entry, int]]:
            if not rest:
                yield names
                return
            yield from extend(rest[1:], done, names)
            change = self._changes[rest[0]]
            if change.after <= done:
                more = dict(names)
                self._apply(change, more)
                yield from extend(rest[1:], done | {rest[0]}, more)

        yield from extend(list(self._changes), frozenset(), self._durable)

    def _reachable(self, names: dict[_Entry, int]) -> list[int]:
        return sorted({number for _, number in self._walk(names)} - self._folders)

    def _walk(self, names: dict[_Entry, int]) -> Iterator[tuple[str, int]]:
        """Yield the paths and numbers of all files and folders."""
        below: dict[int, list[tuple[str, int]]] = {}
        for (parent, name), number in names.items():
            below.setdefault(parent, []).append((name, number))
        waiting = [("", 0)]
        while waiting:
            path, folder = waiting.pop()
            for name, number in below.get(folder, []):
                yield f"{path}{name}", number
                if number in self._folders:
                    waiting.append((f"{path}{name}/", number))

    def _tree(self, names: dict[_Entry, int], contents: dict[int, bytes]) -> Tree:
        return {
            path: None if number in self._folders else contents.get(number, self._files[number].synced)
            for path, number in self._walk(names)
        }


def crash_states(
    before: Disk, calls: Iterable[Call], random: Random, *, at_most: int, drawn: int
) -> Iterator[tuple[Tree, Tree]]:
    """Yield the different states after a crash, each with the state without it.

    All states after a call are tried if there are at most `at_most`; otherwise, `drawn` random ones.
    """
    disk, seen = deepcopy(before), set()
    for call in calls:
        disk.replay(call)
        newest = disk.newest()
        trees = list(itertools.islice(disk.all_states(), at_most + 1)) if at_most else []
        if len(trees) not in range(1, at_most + 1):
            trees = [disk.random_state(random) for _ in range(drawn)]
        for tree in trees:
            if (key := (_digest(tree), _digest(newest))) not in seen:
                seen.add(key)
                yield tree, newest


def _digest(tree: Tree) -> bytes:
    """Return an identifier of a state."""
    parts = ((path, b"/" if content is None else b"=" + content) for path, content in sorted(tree.items()))
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=16).digest()


def write_tree(tree: Tree, root: Path) -> None:
    """Replace the content of a folder with a state."""
    for entry in os.scandir(root):
        shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
    for path, content in sorted(tree.items()):
        if content is None:
            os.mkdir(root / path, 0o700)  # as a local tier must have
        else:
            (root / path).write_bytes(content)


def record(folder: Path, processes: Sequence[tuple[Callable[..., None], tuple[object, ...]]]) -> list[Call]:
    """Run functions in new processes with strace; return their calls, which must explain the folder."""
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
            yield match[2], [argument for argument in arguments if argument != ""], int(match[4])


def _decode(text: str) -> bytes:
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1")
