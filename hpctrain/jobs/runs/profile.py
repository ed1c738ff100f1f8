"""Profile of some ranks of an active run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import RunFailed, SpecError, WaitTimeout
from hpctrain.files import read_json, write_atomic
from hpctrain.jobs.runs.run import Run, require_running_ranks
from hpctrain.text import format_ranks, pluralize

_POLL_S = 0.2
#: Seconds between two queries of the run's state, which may query Slurm.
_STATUS_POLL_S = 5.0


@dataclass(frozen=True)
class ProfileRequest:
    """A request to profile the next optimizer steps of some ranks."""

    run: Run
    number: int
    ranks: tuple[int, ...]
    num_steps: int
    attempt: int | None

    @classmethod
    def submit(cls, run: Run, ranks: Sequence[int], num_steps: int) -> ProfileRequest:
        status, _ = require_running_ranks(run, ranks, option="--ranks", done="profiled")
        if run.dir.profile_request.exists():
            raise SpecError(
                f"Another profile of run {run.run_id} is pending ({run.dir.profile_request}). Wait until "
                "that profile is complete, or delete this file."
            )
        number = run.dir.new_profile()
        request = {"number": number, "ranks": list(ranks), "steps": num_steps}
        write_atomic(run.dir.profile_request, json.dumps(request) + "\n", durable=False)
        return cls(run, number, tuple(ranks), num_steps, status.attempt)

    def wait(self, timeout_s: float, report: Callable[[str], object]) -> list[dict[str, Any]]:
        """Wait for the results of all ranks, in order. A pending request is withdrawn on an error."""
        deadline, status_at, awaited = time.monotonic() + timeout_s, time.monotonic() + _STATUS_POLL_S, ""
        try:
            while missing := self._missing():
                if (description := self._describe_awaited(missing)) != awaited:
                    awaited = description
                    report(f"Waiting for {awaited}")
                if time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"The profile of run {self.run.run_id} is still incomplete after {timeout_s:g} s: "
                        f"waiting for {awaited}. Use `hpctrain status` to check that the run is completing "
                        "steps, or set a longer --timeout."
                    )
                if time.monotonic() >= status_at:
                    self._check_attempt()
                    status_at = time.monotonic() + _STATUS_POLL_S
                time.sleep(_POLL_S)
        finally:
            if self._is_pending():
                with suppress(OSError):
                    self.run.dir.profile_request.unlink()
        return [read_json(self.run.dir.profile_result(self.number, rank)) for rank in self.ranks]

    def _is_pending(self) -> bool:
        """Return true if the supervisor has not sent this request. The file may contain a later request."""
        with suppress(OSError, ValueError):
            return bool(read_json(self.run.dir.profile_request).get("number") == self.number)
        return False

    def _describe_awaited(self, missing: Sequence[int]) -> str:
        if self._is_pending():
            return f"the supervisor to send the request to {format_ranks(missing)}"
        return f"{format_ranks(missing)} to complete {pluralize(self.num_steps, 'step')}"

    def _check_attempt(self) -> None:
        status = self.run.status()
        if (status.state.ended or status.attempt != self.attempt) and (missing := self._missing()):
            end, advice = f"is {status.state}", ""
            if not status.state.ended:
                end, advice = f"is now in attempt {status.attempt}", " Request another profile."
            raise RunFailed(
                f"Run {self.run.run_id} {end}. In attempt {self.attempt}, {format_ranks(missing)} did not "
                f"complete the {pluralize(self.num_steps, 'step')} to profile.{advice}"
            )

    def _missing(self) -> list[int]:
        names = set(self.run.dir.storage.names(self.run.dir.profile(self.number)))
        path = self.run.dir.profile_result
        return [rank for rank in self.ranks if path(self.number, rank).name not in names]
