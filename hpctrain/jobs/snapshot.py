"""A copy of the code, made at submission: a run that is requeued runs what was submitted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.files import write_atomic
from hpctrain.jobs.backends import SubmissionUnclear
from hpctrain.jobs.copied_code import Code
from hpctrain.jobs.git import NoRepository, Repository
from hpctrain.rundir import RunDir

#: What a small file costs, in bytes: a hundred thousand of them take long to copy, however small they are.
_LEAST = 4096


@dataclass(frozen=True)
class Snapshot:
    """Files of a working tree that are to be copied."""

    repository: Repository
    script: Path | None
    """The script's place in the working tree; None where it is elsewhere."""
    files: Mapping[str, bool]
    """Each with whether it is new: not known to git."""
    size_bytes: int

    @classmethod
    def plan(
        cls, script: str, limit_mb: int, environ: Mapping[str, str], *, folder: Path | None = None
    ) -> Snapshot:
        """What there is to copy for a script. Nothing is written.

        Args:
            script: the script.
            limit_mb: how much may be copied.
            environ: the variables that git runs under.
            folder: a folder of the working tree, where the script does not lie in it.

        Raises:
            NoRepository: it is not known what belongs to the script.
            SpecError: there is more than `limit_mb`, or git does not answer.
        """
        path = Path(os.path.realpath(script))
        repository = Repository.around(folder or path.parent, environ)
        place = None if folder else path.relative_to(repository.root)
        files = repository.files()
        if place is not None:
            # The script is what was asked for, ignored or not.
            files.setdefault(str(place), True)
        root = str(repository.root)
        sizes = {name: os.lstat(os.path.join(root, name)).st_size for name in files}
        snapshot = cls(repository, place, files, sum(sizes.values()))
        if (total := sum(max(size, _LEAST) for size in sizes.values())) > limit_mb * 1e6:
            largest = max(sizes, key=lambda name: sizes[name])
            raise SpecError(
                f"The code of {str(repository.root)!r}, as git has it, is {_mb(total)} in {len(files)} "
                f"files, but {limit_mb} MB (--snapshot-limit) is the most that is copied. The largest is "
                f"{largest!r} with {_mb(sizes[largest])}. Have git ignore what is no code, give a higher "
                "--snapshot-limit, or submit without a copy: --no-snapshot."
            )
        return snapshot

    @contextmanager
    def taken(self, run: RunDir) -> Iterator[Code]:
        """Copy the files into the run folder. The copy goes again where the block fails to submit the job.

        Raises:
            OSError: a file cannot be read or written.
        """
        copy = run.new_code()
        temporary = copy.with_name(f".{copy.name}.tmp")
        try:
            diff = self.repository.diff()
            self._copy_to(temporary)
            self._record(copy, diff.text() if diff else "")
            os.rename(temporary, copy)
            script = None if self.script is None else str(copy / self.script)
            yield Code(source=str(self.repository.root), copy=str(copy), script=script)
        except BaseException as error:
            if not isinstance(error, SubmissionUnclear):
                _remove(temporary, copy)
            raise

    def _copy_to(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        # Texts, for there may be thousands of files, and a `Path` of each takes as long as the copy.
        root, made = str(self.repository.root), set()
        for name in self.files:
            source, target = os.path.join(root, name), os.path.join(folder, name)
            if (parent := os.path.dirname(target)) not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            try:
                if os.path.islink(source):
                    os.symlink(self._target_of(name), target)
                else:
                    shutil.copy(source, target)
            except OSError as error:
                if str(error.filename) != source:
                    raise
                raise SpecError(
                    f"{source!r} cannot be copied into the run folder: {error.strerror}. See to it, "
                    "have git ignore it, or submit without a copy of the code: --no-snapshot."
                ) from error

    def _target_of(self, link: str) -> str:
        """Where the copy of a link leads: to its target's copy, or to that itself where there is none."""
        root = str(self.repository.root)
        here = os.path.dirname(os.path.join(root, link))
        path = os.path.normpath(os.path.join(here, os.readlink(os.path.join(root, link))))
        name = os.path.relpath(path, root)
        if any(file == name or file.startswith(f"{name}/") for file in self.files):
            return os.path.relpath(path, here)
        return path

    def _record(self, copy: Path, diff: str) -> None:
        """Write down beside the copy what it is one of."""
        new = [name for name, is_new in self.files.items() if is_new]
        record = {
            "source": str(self.repository.root),
            "commit": self.repository.commit,
            "changed": bool(diff or new),
            "new_files": new,
            "num_files": len(self.files),
            "size_bytes": self.size_bytes,
        }
        write_atomic(copy.with_name(f"{copy.name}.json"), json.dumps(record, indent=1) + "\n", durable=False)
        copy.with_name(f"{copy.name}.diff").write_bytes(diff.encode("utf-8", "surrogateescape"))


def plan_snapshot(
    script: str, limit_mb: int, environ: Mapping[str, str], *, folder: Path | None = None
) -> tuple[Snapshot | None, list[str]]:
    """What there is to copy, and what the user should know where that is nothing. See `Snapshot.plan`.

    Raises:
        SpecError: there is too much.
    """
    if limit_mb < 1:
        raise SpecError(f"--snapshot-limit is {limit_mb}, but it takes at least 1. See --no-snapshot.")
    try:
        return Snapshot.plan(script, limit_mb, environ, folder=folder), []
    except NoRepository as reason:
        return None, [
            f"The code is not copied ({reason}): an attempt that starts later runs what the files hold then."
        ]


def _remove(temporary: Path, copy: Path) -> None:
    for folder in (temporary, copy):
        shutil.rmtree(folder, ignore_errors=True)
    for suffix in (".json", ".diff"):
        copy.with_name(copy.name + suffix).unlink(missing_ok=True)
    if copy.parent.is_dir() and not any(copy.parent.iterdir()):
        copy.parent.rmdir()


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
