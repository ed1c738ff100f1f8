"""Keep the code that `torch.compile` generates in the run folder, and load it in the next attempt.

The caches of Inductor and Triton are on the local disk of a node. Their folders cannot be shared: temporary
files are named by process and thread, and locks require the file system's support. This module stores them as
`torch.compiler.save_cache_artifacts` returns them (torch 2.7 and newer). A file belongs to a local rank,
because generated code contains the number of the device. torch uses an entry only for the same graph.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from hpctrain.cluster import Ranks
from hpctrain.files import make_folder, read_regular, write_atomic
from hpctrain.rundir import RunDir
from hpctrain.runtime.program.import_watcher import call_after_import
from hpctrain.telemetry.sampling.nvml import read_driver_facts
from hpctrain.text import format_size

#: Inductor sets its variable to this folder, followed by the name of the user.
_DEFAULT_FOLDER = Path(tempfile.gettempdir(), "torchinductor_")
#: Imported at the first compilation.
_COMPILER = "torch._inductor.compile_fx"
#: Maximum size of the files of a local rank, for all devices and versions.
MAX_BYTES = 512_000_000
_CHECKSUM_BYTES = hashlib.sha256().digest_size
#: Delay of the first node's successors, whose code is usually that of the first node.
_OTHER_NODES_DELAY_S = 60.0


class CompileCache:
    def __init__(self) -> None:
        self.is_active = False
        """True if the step hook calls `after_step`."""
        self._stored: dict[Path, frozenset[str]] = {}
        """Keys of the artifacts in each file that this process loaded or wrote."""
        self._due_at: float | None = None

    def install(self, run: RunDir, ranks: Ranks, environ: Mapping[str, str]) -> None:
        """Load the files of earlier attempts when this process first compiles, and write files from then on.

        A folder that the user has chosen for Inductor is assumed to outlast the attempt.
        """
        folder = Path(environ.get("TORCHINDUCTOR_CACHE_DIR", _DEFAULT_FOLDER))
        if not folder.name.startswith(_DEFAULT_FOLDER.name) or folder.parent != _DEFAULT_FOLDER.parent:
            return
        self._run, self._ranks = run, ranks
        call_after_import(_COMPILER, self._load)

    def _load(self, _compiler: object) -> None:
        import torch

        if not hasattr(torch.compiler, "load_cache_artifacts"):  # before torch 2.7
            return
        try:
            gpus = sorted(set(read_driver_facts().names))
            parts = [*gpus, torch.backends.cpu.get_cpu_capability(), f"torch-{torch.__version__}"]
            machine = re.sub(r"[^\w.+]+", "-", "-".join([*parts, str(sys.implementation.cache_tag)]))
            self._folder = self._run.compile_cache / machine
            self._artifacts = sys.modules["torch.compiler._cache"].CacheArtifactManager
            self.is_active = True
            for path in self._files(self._folder):
                self._load_file(path)
        except Exception as error:  # noqa: BLE001 (the program must start)
            _report("load", error)

    def _load_file(self, path: Path) -> None:
        import torch

        try:
            data = read_regular(path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # A rank on another node may have replaced it.
                _report("load", error)
            return
        try:
            if hashlib.sha256(data[_CHECKSUM_BYTES:]).digest() != data[:_CHECKSUM_BYTES]:
                raise ValueError(f"{path} is damaged")
            if (info := torch.compiler.load_cache_artifacts(data[_CHECKSUM_BYTES:])) is None:
                raise ValueError(f"torch cannot read {path}")
            self._stored[path] = _artifact_keys(info)
        except Exception as error:  # noqa: BLE001 (the program must start)
            _report("load", error)
            with suppress(OSError):
                path.unlink()

    def after_step(self) -> None:
        """Write the artifacts of this process if the step has compiled anything that no file contains."""
        try:
            if not self._artifacts.need_serialize():
                return
            if self._due_at is None:
                self._due_at = time.monotonic() + (_OTHER_NODES_DELAY_S if self._ranks.node_rank else 0)
            if time.monotonic() >= self._due_at:
                self._due_at = None
                self._save()
        except Exception as error:  # noqa: BLE001 (the training must continue)
            _report("save", error)
            self.is_active = False

    def _save(self) -> None:
        import torch

        if (saved := torch.compiler.save_cache_artifacts()) is None:
            raise ValueError("torch cannot serialize it")
        content, keys = saved[0], _artifact_keys(saved[1])
        name = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:16]
        path = self._folder / f"{self._ranks.local_rank}-{name}"
        if path.exists() or any(keys <= stored for stored in self._stored.values()):
            return
        if len(content) > MAX_BYTES:
            raise ValueError(f"it takes {format_size(len(content))}, more than {format_size(MAX_BYTES)}")
        make_folder(path.parent)
        write_atomic(path, hashlib.sha256(content).digest() + content, durable=False)
        replaced = {file for file, stored in self._stored.items() if stored < keys}
        self._stored[path] = keys
        total = 0
        for file, size in self._files(*self._run.compile_cache.iterdir()).items():
            total += size
            if file in replaced or total > MAX_BYTES:
                file.unlink(missing_ok=True)

    def _files(self, *folders: Path) -> dict[Path, int]:
        """Return the files of this local rank and their sizes, the newest first."""
        files = []
        for path in chain.from_iterable(folder.glob(f"{self._ranks.local_rank}-*") for folder in folders):
            with suppress(FileNotFoundError):  # removed by a rank on another node
                files.append((path.stat(), path))
        files.sort(key=lambda file: -file[0].st_mtime)
        return {path: status.st_size for status, path in files}


def _artifact_keys(info: Any) -> frozenset[str]:
    # Before torch 2.8, the object has a list for each kind.
    return frozenset(chain.from_iterable(getattr(info, "artifacts", vars(info)).values()))


def _report(action: str, error: Exception) -> None:
    attempt = "This" if action == "load" else "The next"
    print(
        f"hpctrain: cannot {action} the compiled code of this rank: {error}. "
        f"{attempt} attempt compiles again.",
        file=sys.stderr,
    )


#: The cache of this process.
compile_cache = CompileCache()
