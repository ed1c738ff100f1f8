"""Call functions after the program has imported certain modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call_after_import(name: str, on_import: Callable[[ModuleType], object]) -> None:
    """Call a function with a module immediately after its import, or now if it is already imported."""
    if name in sys.modules:
        on_import(importlib.import_module(name))  # waits for an import in another thread
    else:
        sys.meta_path.insert(0, ImportWatcher(name, on_import))


class ImportWatcher:
    """Finder that adds a call to the execution of one module."""

    def __init__(self, name: str, on_import: Callable[[ModuleType], object]) -> None:
        self._name, self._on_import = name, on_import

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        # In place, a concurrent import in another thread would skip a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                try:
                    execute(module)
                except BaseException:
                    sys.meta_path.insert(0, self)  # the program may import it again
                    raise
                self._on_import(module)

            loader.exec_module = execute_and_call
        return spec
