"""Distribution of the tests to processes: two of them run all tests on Slurm, with a shared cluster each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

from helpers import REPOSITORY

_FUNCTION = re.compile(r"^def (\w+)\((.*?)\)", re.MULTILINE | re.DOTALL)


class SharedSlurmScheduling(LoadScopeScheduling):
    """Schedules tests by file, because they may share a run, but those on Slurm in two groups and first."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if "[slurm" in test or test.partition("[")[0] in _functions_on_slurm(REPOSITORY / file):
            return f"slurm, {file.split('/')[1] == 'jobs'}"
        return file


@cache
def _functions_on_slurm(file: Path) -> set[str]:
    """Return the functions of a file that use Slurm, directly or by a fixture of the file."""
    functions = {name: set(re.findall(r"\w+", words)) for name, words in _FUNCTION.findall(file.read_text())}
    found, grown = {"slurm", "accounting"}, True
    while grown:
        new = {name for name, words in functions.items() if words & found} - found
        found, grown = found | new, bool(new)
    return found
