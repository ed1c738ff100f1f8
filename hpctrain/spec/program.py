"""The kinds of program that a run can execute."""

from __future__ import annotations

from typing import Literal

#: `script` is the path of a Python file, `module` a module's name as for `python -m`, `command` any other
#: command on the PATH of the ranks.
ProgramKind = Literal["script", "module", "command"]

#: Commands that start ranks as child processes.
RANK_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
