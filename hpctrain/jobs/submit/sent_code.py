"""Code that another machine sent to this folder (see `hpctrain.remote.send_code`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.files import read_json
from hpctrain.jobs.options.resolved_options import SENT_CODE_FILE


@dataclass(frozen=True)
class SentCode:
    """Files sent by another machine; replaces the `GitRepository`, which exists only on that machine."""

    root: Path
    commit: str | None
    _files: Mapping[str, bool]
    _diff: str

    @classmethod
    def containing(cls, folder: Path) -> SentCode | None:
        """Return the sent code that contains a folder; None if git manages it, or it was not sent.

        Raises:
            SpecError: the list of the files is damaged.
        """
        real = Path(os.path.realpath(folder))
        root = next((each for each in (real, *real.parents) if (each / SENT_CODE_FILE).is_file()), None)
        between = (each for each in (real, *real.parents) if root and each.is_relative_to(root))
        if root is None or any(os.path.lexists(each / ".git") for each in between):
            return None
        try:
            record = read_json(root / SENT_CODE_FILE)
            files = {str(name): bool(is_new) for name, is_new in record["files"].items()}
            commit, diff = record["commit"], str(record["diff"])
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise SpecError(f"{str(root / SENT_CODE_FILE)!r} is damaged: {error}. Submit again.") from error
        if outside := [name for name in files if name.startswith("/") or ".." in name.split("/")]:
            raise SpecError(
                f"{str(root / SENT_CODE_FILE)!r} contains {outside[0]!r}, which is outside the project. "
                "Submit again."
            )
        return cls(root, None if commit is None else str(commit), files, diff)

    def files(self) -> dict[str, bool]:
        """Return the files that still exist; True for those that git does not track."""
        return {name: is_new for name, is_new in self._files.items() if os.path.lexists(self.root / name)}

    def diff(self) -> SentCode:
        return self

    def text(self) -> str:
        """Return the changes since the commit."""
        return self._diff
