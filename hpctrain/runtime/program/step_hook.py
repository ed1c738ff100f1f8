"""Steps of a script without the Trainer, counted by torch's global optimizer hook.

The hook is installed when the script imports torch, so a rank that never does pays nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpctrain.records.rank_phase import RankPhase
from hpctrain.runtime.rank_activity import activity

#: The module that holds the global hooks.
_OPTIMIZER_MODULE = "torch.optim.optimizer"


def install_step_hook() -> None:
    """Count optimizer steps of this process from now on, or from the import of torch on."""
    if _OPTIMIZER_MODULE in sys.modules:
        _register(sys.modules[_OPTIMIZER_MODULE])
    else:
        sys.meta_path.insert(0, _ImportWatcher())


def _register(module: ModuleType) -> None:
    module.register_optimizer_step_post_hook(_StepCounter())


class _StepCounter:
    """The hook. Only steps of the first optimizer count, because a script may update several in a step."""

    def __init__(self) -> None:
        self._counted: Any = lambda: None

    def __call__(self, optimizer: object, _args: object, _kwargs: object) -> None:
        counted = self._counted()
        if counted is not optimizer:
            if counted is not None:
                return
            self._counted = weakref.ref(optimizer)
        if not activity.is_managed:
            activity.phase = RankPhase.SCRIPT
            activity.step_done()


class _ImportWatcher(MetaPathFinder):
    """Finds the optimizer module once, and registers the hook after its import."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 (the protocol of finders)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if name != _OPTIMIZER_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads a module with another loader, then registers the hook."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        # Readers of source and resources, such as inspect, use the loader of the module.
        return getattr(self._loader, name)
