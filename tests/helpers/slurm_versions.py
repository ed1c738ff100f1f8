"""Slurm versions other than the installed one."""

from __future__ import annotations

import os

import pytest

from hpctrain.errors import UserError
from hpctrain.sandbox.download_slurm import download_slurm

#: The last has a smoke test in `make test`; `make test-slurm-versions` runs many tests with each.
SLURM_VERSIONS = ("24.11", "26.05")


def need_slurm_version(version: str) -> None:
    """Skip the test if the mirror cannot be reached or is not Debian's; with CI=true, fail."""
    try:
        download_slurm(version)
    except UserError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true, so Slurm {version} must be available: {error}", pytrace=False)
        pytest.skip(f"Slurm {version} is not available: {error}")
