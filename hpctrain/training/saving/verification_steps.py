"""Steps of a verification, which trains a part of a run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Self

from hpctrain.errors import EXIT_CONTINUE
from hpctrain.rundir import VERIFY_STEPS_VARIABLE, VERIFY_SYNC_STEPS_VARIABLE, RunDir
from hpctrain.runtime.distributed_context import DistributedContext


@dataclass(frozen=True)
class VerificationSteps:
    """The steps of `hpctrain verify` in this run, which is a copy of the verified run."""

    saved: frozenset[int]
    """Steps whose states are compared; no others are saved."""
    synced: frozenset[int]
    """Steps that the verified run saved. Some algorithms change the state of the ranks before a save."""
    last: int
    """Step after which training ends."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the steps; None if this run is not a verification."""
        if (text := environ.get(VERIFY_STEPS_VARIABLE)) is None:
            return None
        saved = _parse(text)
        return cls(
            frozenset(saved), frozenset(_parse(environ.get(VERIFY_SYNC_STEPS_VARIABLE, ""))), saved[-1]
        )

    def end_run(self, run: RunDir, context: DistributedContext) -> NoReturn:
        """End the run after its last state is saved. All ranks must call this.

        Raises:
            SystemExit: always.
        """
        if context.ranks.is_main:
            # Otherwise, the supervisor would continue the run.
            run.cancel_request.touch()
        context.barrier()
        raise SystemExit(EXIT_CONTINUE)


def _parse(text: str) -> list[int]:
    return [int(step) for step in text.split(",") if step]
