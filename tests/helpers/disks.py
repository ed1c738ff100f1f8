"""File systems of a chosen size."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.commands import run_command


@contextmanager
def mounted_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs at `folder`, whose size is in the mount options."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs takes root")
    folder.mkdir()
    run_command(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder])
    try:
        yield folder
    finally:
        while folder.is_mount():
            run_command(["umount", "--lazy", folder])
