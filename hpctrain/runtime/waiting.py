"""Workers that wait: what they import ahead, and whether a fresh start would come to the same.

A worker that waits is started as any other: by the same command, on the same node, with the same variables.
It only imports what its predecessors have imported, and then waits for the word to begin. Nothing is forked,
and no device is touched. Importing ahead makes no difference as long as the script changes no variable of the
environment before its own imports: a rank whose script does says so, and then nobody waits for its place.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpctrain.runtime.code_copy import import_from_copy
from hpctrain.runtime.line import Line

#: Modules that take long to import.
_SLOW = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.checkpoint", "hpctrain.training.trainer"),
    *("lightning.pytorch", "pytorch_lightning", "accelerate", "transformers", "torchvision"),
)
#: Variables that PyTorch and we ourselves set on the way.
_SET_ON_THE_WAY = frozenset(
    {"GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING"}
    | {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
)


def changed_variables(before: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Variables that the script has set, changed or taken away."""
    names = before.keys() | environ.keys()
    return sorted({name for name in names if before.get(name) != environ.get(name)} - _SET_ON_THE_WAY)


def slow_modules(loaded: Iterable[str]) -> list[str]:
    """Those of the `loaded` modules that are worth importing ahead, in the order in which to do so."""
    there = set(loaded)
    return [name for name in _SLOW if name in there]


@dataclass(frozen=True)
class Word:
    """The word to begin."""

    variables: dict[str, str]
    """What was not known when the process was started."""
    printed: bytes
    """What the imports have printed, which belongs into the rank's log."""


def wait_for_the_word(line: Line, modules: list[str], script: str) -> Word:
    """Import `modules` as `script` would find them, and wait.

    Where there is nothing to wait for any more, or a module cannot be imported, the process ends.
    """
    with tempfile.TemporaryFile() as printed:
        launchers = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(printed.fileno(), fd)
        try:
            _import(modules, script)
        except Exception as error:  # noqa: BLE001 (the script will show it, in its own place)
            with suppress(OSError):
                line.send({"ready": False, "why": f"{type(error).__name__}: {error}"})
            _leave()
        try:
            line.send({"ready": True})
            while (message := line.receive()) is None or "go" not in message:
                pass
        except (OSError, ValueError):
            _leave()
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, launchers_own in zip((1, 2), launchers, strict=True):
            os.dup2(launchers_own, fd)
            os.close(launchers_own)
        printed.seek(0)
        return Word(message["go"], printed.read())


def _import(modules: list[str], script: str) -> None:
    places = list(sys.path)
    import_from_copy(os.environ)
    sys.path.insert(0, str(Path(script).resolve().parent))
    for name in modules:
        importlib.import_module(name)
    sys.path[:] = places


def _leave() -> NoReturn:
    os._exit(0)
