"""A folder in memory, where a state of a disk is written in a millisecond."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def disk_folder(tmp_path) -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as base:
        folder = Path(base, "disk").resolve()
        folder.mkdir()
        yield folder


@pytest.fixture(autouse=True)
def _no_logging() -> Iterator[None]:
    """The records of ten thousand loads would fill the memory."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
