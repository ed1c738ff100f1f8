"""Define the kinds of program, and the launchers: a task per rank, or a torchrun agent per node."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from hpctrain.errors import SpecError
from hpctrain.rundir import CHILD_VARIABLE

#: `script` is the path of a Python file, `module` a module's name as for `python -m`, `command` any other
#: command on the PATH of the ranks, `batch` the path of a batch script, which starts the ranks itself.
ProgramKind = Literal["script", "module", "command", "batch"]
#: Commands that start ranks as child processes.
RANK_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})

#: The folder with the hook that Python runs at its start.
_HOOK_FOLDER = Path(__file__).parents[1] / "runtime/program/startup_hook"

LauncherName = Literal["srun", "torchrun"]
RendezvousBackend = Literal["c10d", "etcd", "etcd-v2"]

_ENDPOINT = re.compile(r"[^\s:/]+:\d{1,5}|\[[0-9A-Fa-f:]+\]:\d{1,5}")


class TorchrunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rdzv_backend: RendezvousBackend = "c10d"
    rdzv_endpoint: str | None = None
    """Address and port of an etcd server. With c10d, the endpoint is the supervisor."""

    def __post_init__(self) -> None:
        if self.rdzv_backend == "c10d":
            if self.rdzv_endpoint is not None:
                raise SpecError(
                    f"rdzv_endpoint is {self.rdzv_endpoint}, but rdzv_backend is c10d, whose "
                    "endpoint is the supervisor. Remove rdzv_endpoint, or set rdzv_backend to etcd-v2."
                )
        elif self.rdzv_endpoint is None:
            raise SpecError(
                f"rdzv_backend is {self.rdzv_backend}, which requires the address of an etcd server. Add "
                "rdzv_endpoint, such as HOST:PORT."
            )
        elif not _ENDPOINT.fullmatch(self.rdzv_endpoint):
            raise SpecError(f"{self.rdzv_endpoint!r} (rdzv_endpoint) is not of the form HOST:PORT.")


def observing_variables(command: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which the Python processes of a command report, given facts for them."""
    paths = [str(_HOOK_FOLDER), *filter(None, [environ.get("PYTHONPATH")])]
    return {CHILD_VARIABLE: json.dumps(command), "PYTHONPATH": os.pathsep.join(paths)}
