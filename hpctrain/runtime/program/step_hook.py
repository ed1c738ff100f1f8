"""Count the steps of a script without the Trainer with torch's global optimizer hooks."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hpctrain.record_types import RankPhase
from hpctrain.runtime.program.compile_cache import compile_cache
from hpctrain.runtime.program.import_watcher import call_after_import
from hpctrain.runtime.program.rank_0_wait import wait_in_rendezvous
from hpctrain.runtime.program.step_profiler import step_profiler
from hpctrain.runtime.rank_activity import activity


def install_step_hook(after_step: Callable[[], None] = lambda: None, *, is_restart: bool = False) -> None:
    """Count optimizer steps of this process, and call `after_step` in the main thread after each.

    With `is_restart`, the script may load weights of an earlier attempt, not only pretrained ones.
    """
    if os.environ.get("HPCTRAIN_STEP_HOOK") == "0":
        return
    step_profiler.counts_steps = True
    call_after_import("torch.optim.optimizer", _StepHook(after_step, is_restart).register)
    call_after_import("torch.distributed.rendezvous", wait_in_rendezvous)


class _StepHook:
    """Hooks that count only steps of the first optimizer, because a script may update several in a step."""

    def __init__(self, after_step: Callable[[], None], is_restart: bool) -> None:
        self._after_step, self._is_restart = after_step, is_restart
        self._counted: Any = lambda: None
        self._restored: dict[int, int | None] = {}
        """Restored steps of each optimizer that has begun its first step, by id."""
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that have loaded a state, which has no number of steps for SGD with momentum."""
        self._script_values: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        """Settings of each optimizer before it first loaded a state."""
        self._ignored: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._has_loaded_weights = False

    def register(self, module: ModuleType) -> None:
        self._first_step_handle: Any = module.register_optimizer_step_pre_hook(self._before_first_step)
        module.register_optimizer_step_post_hook(self)
        _observe_loads(module.Optimizer, self._on_state_loaded, self._before_state_is_loaded)
        # Plain SGD has no state to load, so the load of weights counts.
        if self._is_restart and (modules := sys.modules.get("torch.nn.modules.module")) is not None:
            _observe_loads(modules.Module, self._on_weights_loaded)

    def _before_state_is_loaded(self, optimizer: Any) -> None:
        if self._is_restart:
            from hpctrain.runtime.resumed_values import configured_values

            self._script_values.setdefault(optimizer, configured_values([optimizer], []))

    def _on_state_loaded(self, optimizer: Any) -> None:
        # Accelerate moves the state of each new optimizer to the device, by a load of the empty state.
        if optimizer.state:
            self._loaded.add(optimizer)
        if self._is_restart:
            self._ignored[optimizer] = self._ignored_values(optimizer)

    def _ignored_values(self, optimizer: Any) -> list[Any]:
        from hpctrain.runtime.resumed_values import ignored_values

        if (script := self._script_values.get(optimizer)) is None:
            return []
        rates = [group.get("lr") for group in optimizer.param_groups]
        ignored = ignored_values([optimizer], [], script, None)
        # With a scheduler, the initial rate of the checkpoint remains, but does not matter.
        return [value for value in ignored if value.name != "lr" or value.script_value not in rates]

    def _on_weights_loaded(self, _module: object) -> None:
        self._has_loaded_weights = True

    def _before_first_step(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        if id(optimizer) in self._restored:
            return
        unknown = None if optimizer in self._loaded or self._has_loaded_weights else 0
        self._restored[id(optimizer)] = restored_steps(optimizer) or unknown
        # After the load, the script may have set its own values.
        if self._is_restart and not activity.is_managed:
            current, ignored = self._ignored_values(optimizer), self._ignored.pop(optimizer, [])
            activity.ignored = [*(activity.ignored or ()), *(value for value in current if value in ignored)]

    def __call__(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        counted = self._counted()
        if counted is not optimizer:
            if counted is not None:
                return
            self._counted = weakref.ref(optimizer)
            if not activity.optimizer_steps:
                activity.restored_steps = self._restored.get(id(optimizer), 0)
        if self._first_step_handle is not None and not self._ignored:
            self._first_step_handle.remove()
            self._first_step_handle = None
        activity.optimizer_steps += 1
        if step_profiler.is_active:
            step_profiler.after_step()
        if compile_cache.is_active:
            compile_cache.after_step()
        if not activity.is_managed:
            activity.phase = RankPhase.SCRIPT
            activity.step_done()
            self._after_step()


def _observe_loads(
    owner: Any, on_load: Callable[[Any], object], before_load: Callable[[Any], object] = lambda _: None
) -> None:
    """Call functions with each object of a class before and after it loads a state."""
    load = owner.load_state_dict

    @functools.wraps(load)
    def load_state_dict(loaded: Any, *args: Any, **kwargs: Any) -> Any:
        before_load(loaded)
        result = load(loaded, *args, **kwargs)
        on_load(loaded)
        return result

    owner.load_state_dict = load_state_dict


def restored_steps(optimizer: Any) -> int | None:
    """Return the number of steps in the state of an optimizer, as stored by Adam and most others."""
    if not optimizer.state:
        return 0
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return int(max(steps)) if steps else None
