"""Count the steps of a script without the Trainer with torch's global optimizer hooks.

The hooks are installed when the script imports torch, so there is no cost for ranks without torch.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpctrain.runtime.program.step_profiler import step_profiler
from hpctrain.runtime.rank_activity import activity
from hpctrain.schema import RankPhase

#: The module that holds the global hooks.
_OPTIMIZER_MODULE = "torch.optim.optimizer"


def install_step_hook(after_step: Callable[[], None] = lambda: None, *, is_restart: bool = False) -> None:
    """Count optimizer steps of this process, and call `after_step` in the main thread after each.

    With `is_restart`, the script may load weights of an earlier attempt, not only pretrained ones.
    """
    if os.environ.get("HPCTRAIN_STEP_HOOK") == "0":
        return
    hook = _StepHook(after_step, is_restart)
    step_profiler.counts_steps = True
    if _OPTIMIZER_MODULE in sys.modules:
        hook.register(sys.modules[_OPTIMIZER_MODULE])
    else:
        sys.meta_path.insert(0, _ImportWatcher(hook))


class _StepHook:
    """Hooks that count only steps of the first optimizer, because a script may update several in a step."""

    def __init__(self, after_step: Callable[[], None], is_restart: bool) -> None:
        self._after_step, self._is_restart = after_step, is_restart
        self._counted: Any = lambda: None
        self._restored: dict[int, int | None] = {}
        """Restored steps of each optimizer that has begun its first step, by id."""
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that have loaded a state, which has no number of steps for SGD."""
        self._has_loaded_weights = False

    def register(self, module: ModuleType) -> None:
        self._first_step_handle = module.register_optimizer_step_pre_hook(self._before_first_step)
        module.register_optimizer_step_post_hook(self)
        load = module.Optimizer.load_state_dict

        @functools.wraps(load)
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            load(optimizer, *args, **kwargs)
            self._loaded.add(optimizer)

        module.Optimizer.load_state_dict = load_state_dict
        # Plain SGD has no state to load, so the load of weights counts.
        if self._is_restart and (modules := sys.modules.get("torch.nn.modules.module")) is not None:
            load_weights = modules.Module.load_state_dict

            @functools.wraps(load_weights)
            def load_module(module: Any, *args: Any, **kwargs: Any) -> Any:
                self._has_loaded_weights = True
                return load_weights(module, *args, **kwargs)

            modules.Module.load_state_dict = load_module

    def _before_first_step(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        unknown = None if optimizer in self._loaded or self._has_loaded_weights else 0
        self._restored.setdefault(id(optimizer), restored_steps(optimizer) or unknown)

    def __call__(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        counted = self._counted()
        if counted is not optimizer:
            if counted is not None:
                return
            self._counted = weakref.ref(optimizer)
            if not activity.optimizer_steps:
                self._first_step_handle.remove()
                activity.restored_steps = self._restored.get(id(optimizer), 0)
        activity.optimizer_steps += 1
        if step_profiler.is_active:
            step_profiler.after_step()
        if not activity.is_managed:
            activity.phase = RankPhase.SCRIPT
            activity.step_done()
            self._after_step()


def restored_steps(optimizer: Any) -> int | None:
    """Return the number of steps in the state of an optimizer, as stored by Adam and most others."""
    if not optimizer.state:
        return 0
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return int(max(steps)) if steps else None


class _ImportWatcher(MetaPathFinder):
    """Finds the optimizer module once, and registers the hooks after its import."""

    def __init__(self, hook: _StepHook) -> None:
        self._hook = hook

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
            spec.loader = _RegisteringLoader(spec.loader, self._hook)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader, hook: _StepHook) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook.register(module)

    def __getattr__(self, name: str) -> Any:
        # Readers of source and resources, such as inspect, use the loader of the module.
        return getattr(self._loader, name)
