"""Start a sandbox, whose Slurm the tests of other tools then find."""

from __future__ import annotations

import os
import shutil
import tempfile

from hpctrain import sandbox

NAME = f"suites-{os.getpid()}"
HOME = tempfile.mkdtemp(prefix="conformance-home-")


def pytest_configure() -> None:
    box = sandbox.up(NAME, nodes=4, cpus_per_node=8)
    os.environ.update(box.env, HOME=HOME)


def pytest_unconfigure() -> None:
    sandbox.down(NAME)
    shutil.rmtree(HOME, ignore_errors=True)
