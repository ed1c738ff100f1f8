"""Check something at intervals while an attempt trains."""

from __future__ import annotations

import logging
from typing import Self

from hpctrain import system
from hpctrain.errors import HpctrainError

log = logging.getLogger(__name__)


class PeriodicCheck:
    """Runs `check` in a thread until it returns True, or until the context ends; errors are logged."""

    first_s: float
    interval_s: float
    purpose: str

    def __enter__(self) -> Self:
        self._ended = system.Event()
        if self.first_s > 0:
            system.Thread(target=self._watch, name=f"hpctrain-{type(self).__name__}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def check(self) -> bool:
        """Check once. Returns True if no further check is required."""
        raise NotImplementedError

    def _watch(self) -> None:
        wait_s = self.first_s
        while not self._ended.wait(wait_s):
            wait_s = self.interval_s
            try:
                if self.check():
                    return
            except (HpctrainError, OSError) as error:
                log.warning("cannot %s (%s); will retry", self.purpose, error)
