"""Agreement of the ranks of an attempt on the optimizer step after which they stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class StopAgreement:
    """The supervisor's side of `runtime.stopping.agreed_stop`."""

    def __init__(self, world_size: int, send: Callable[[Mapping[str, Any]], object]) -> None:
        """Wait for the request of a rank.

        Args:
            world_size: number of ranks.
            send: sends a message to all ranks.
        """
        self._world_size, self._send = world_size, send
        self._is_requested = False
        self._steps: dict[int, int | None] = {}
        """Earliest step after which each rank can stop; None for a rank without counted steps."""

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handle a request or an answer of a rank."""
        if message.get("stop") and not self._is_requested:
            self._is_requested = True
            self._send({"prepare_stop": True})
        elif "can_stop_after" in message:
            step = message["can_stop_after"]
            self._steps[rank] = None if step is None else int(step)
            if len(self._steps) == self._world_size:
                self._send({"stop_after": self._common_step()})

    def _common_step(self) -> int | None:
        steps = [step for step in self._steps.values() if step is not None]
        return max(steps) if len(steps) == self._world_size else None
