"""Slurm versions other than the installed one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from helpers.commands import skip_or_fail
from helpers.download_slurm import download_slurm, link_commands, matches_version
from hpctrain import sandbox
from hpctrain.errors import UserError
from hpctrain.sandbox import Sandbox, installed_version, up

#: The last has a smoke test in `make test`; `make test-slurm-versions` runs many tests with each.
SLURM_VERSIONS = ("24.11", "26.05")


def need_slurm_version(version: str) -> None:
    """Skip the test if the mirror cannot be reached or is not Debian's; with CI=true, fail."""
    try:
        download_slurm(version)
    except UserError as error:
        skip_or_fail(f"Slurm {version} is not available: {error}")


def up_with_version(
    name: str, *, slurm: str = "", kind: type[Sandbox] = Sandbox, settings: Sequence[str] = (), **options: Any
) -> Sandbox:
    """Start a sandbox with a Slurm version, which is downloaded the first time; empty: the installed one."""
    if not slurm or matches_version(slurm, installed_version()):
        return up(name, kind=kind, settings=settings, **options)
    packages = download_slurm(slurm)

    class VersionedSandbox(kind):
        def prepare(self) -> None:
            link_commands(self, slurm, packages)
            super().prepare()

    # With 3 s, Slurm 24.11 regards healthy nodes as lost.
    return up(name, kind=VersionedSandbox, settings=["SlurmdTimeout=5", *settings], **options)


@contextmanager
def new_cluster(name: str, *, slurm: str = "", **options: Any) -> Iterator[Sandbox]:
    """Start a cluster for the block, with a Slurm version if given."""
    name = f"{name}-{os.getpid()}"
    if slurm:
        need_slurm_version(slurm)
    # `--slurm-version` replaces `sandbox.up`.
    start = partial(up_with_version, slurm=slurm) if slurm else sandbox.up
    try:
        yield start(name, **options)
    finally:
        sandbox.down(name)
