"""Import modules in advance in a standby worker, and wait for the start message.

Early imports are equivalent unless the script changes environment variables before its own imports. In this
case, the rank reports the variables, and no standby workers are started.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress

from hpctrain.errors import Unauthenticated
from hpctrain.runtime.snapshot_imports import redirect_imports
from hpctrain.runtime.supervisor_connection import SupervisorConnection

#: Modules with slow imports.
_SLOW_MODULES = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.checkpoint", "hpctrain.training.trainer"),
    *("lightning.pytorch", "pytorch_lightning", "accelerate", "transformers", "torchvision"),
)
#: Variables that PyTorch and hpctrain set themselves.
_SET_BY_IMPORTS = frozenset(
    {"GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING"}
    | {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
)


def changed_variables(before: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    names = before.keys() | environ.keys()
    return sorted({name for name in names if before.get(name) != environ.get(name)} - _SET_BY_IMPORTS)


def select_slow_modules(loaded: Iterable[str]) -> list[str]:
    names = set(loaded)
    return [name for name in _SLOW_MODULES if name in names]


def wait_for_start(
    connection: SupervisorConnection, modules: list[str], import_folder: str
) -> tuple[dict[str, str], bytes]:
    """Import `modules` as for a program in `import_folder`, and wait for the start message, or exit.

    Returns the variables that were unknown when the process was started, and the output of the imports.
    """
    with tempfile.TemporaryFile() as printed:
        launcher_fds = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(printed.fileno(), fd)
        try:
            _import(modules, import_folder)
        except Exception as error:  # noqa: BLE001 (the script will raise the error again)
            with suppress(OSError):
                connection.send({"ready": False, "why": f"{type(error).__name__}: {error}"})
            os._exit(0)
        try:
            connection.send({"ready": True})
            while (message := connection.receive()) is None or "go" not in message:
                pass
        except (OSError, ValueError, Unauthenticated):
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, launcher_fd in zip((1, 2), launcher_fds, strict=True):
            os.dup2(launcher_fd, fd)
            os.close(launcher_fd)
        printed.seek(0)
        return message["go"], printed.read()


def _import(modules: list[str], import_folder: str) -> None:
    search_path = list(sys.path)
    redirect_imports(os.environ)
    sys.path.insert(0, import_folder)
    for name in modules:
        importlib.import_module(name)
    sys.path[:] = search_path
