"""Record a sweep in the folder of its job array (`sweep.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpctrain.errors import UserError
from hpctrain.record_types import read_record
from hpctrain.rundir import RunDir
from hpctrain.slurm.job_array import MAX_TASKS
from hpctrain.sweeps.search_space import (
    SearchSpace,
    TrialValues,
    ValueRange,
    draw_trials,
    grid,
    inline_files,
    parse_space,
)
from hpctrain.sweeps.stopping_rules import StoppingRule

DEFAULT_FORMAT = "--{name} {value}"


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """A sweep. Trial n is task n of the job array."""

    args: tuple[str, ...]
    """Arguments of the script before those of the trial."""
    format: str = DEFAULT_FORMAT
    """Format of the arguments of a hyper-parameter, with `{name}` and `{value}`."""
    space: dict[str, str | list[str]]
    """Values of each hyper-parameter, as given by the user."""
    folder: str
    """Folder of files with values."""
    sampler: Literal["grid", "random"] = "grid"
    seed: int = 0
    concurrent: int = 0
    """Maximum number of concurrent trials; 0 means no maximum."""
    metric: str | None = None
    """Metric that ranks the trials; None selects the metric of `keep_best`, otherwise a validation metric."""
    mode: Literal["min", "max"] | None = None
    stopping: StoppingRule | None = None
    """Rule that stops losing trials early."""
    trials: list[TrialValues] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self.format.format(name="n", value="v")
            is_valid = "{value}" in self.format
        except (LookupError, ValueError):
            is_valid = False
        if not is_valid:
            raise UserError(
                f"{self.format!r} is not a valid argument format (--as). Use {{name}} and {{value}}, as in "
                f"{DEFAULT_FORMAT!r} or '{{name}}={{value}}'."
            )

    @property
    def parsed_space(self) -> SearchSpace:
        return parse_space(self.space, Path(self.folder))

    def with_values(self, texts: Mapping[str, str], folder: Path) -> SweepRecord:
        """Add values to a grid, or replace the values that a sampler draws. See `parse_space`."""
        new = inline_files(texts, folder)
        if self.sampler == "grid":
            old, added = self.parsed_space, parse_space(new, folder)
            for name, values in added.items():
                if not isinstance(values, ValueRange):
                    new[name] = list(dict.fromkeys([*old[name], *values]))  # type: ignore[misc]
        return replace(self, space={**self.space, **new})

    def with_trials(self, number: int = 0) -> SweepRecord:
        """Add the missing trials of the grid, or `number` trials drawn by the sampler."""
        if len(self.trials) + number > MAX_TASKS:
            raise UserError(
                f"The sweep would have {len(self.trials) + number} trials, but can have at most {MAX_TASKS}. "
                "Add fewer trials, or submit another sweep."
            )
        if self.sampler == "grid":
            new = [trial for trial in grid(self.parsed_space) if trial not in self.trials]
        else:
            start = len(self.trials)
            new = draw_trials(self.parsed_space, range(start, start + number), self.seed)
        return replace(self, trials=[*self.trials, *new])

    def trial_args(self, index: int) -> tuple[str, ...]:
        formats = self.format.split()
        values = self.trials[index].items()
        return (*self.args, *(form.format(name=name, value=v) for name, v in values for form in formats))

    def array(self, indices: Sequence[int]) -> str:
        is_range = len(indices) > 1 and list(indices) == list(range(indices[0], indices[-1] + 1))
        listed = f"{indices[0]}-{indices[-1]}" if is_range else ",".join(map(str, indices))
        return listed + (f"%{self.concurrent}" if self.concurrent else "")

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_sweep(run: RunDir) -> SweepRecord | None:
    """Return the record of a sweep; None for any other run."""
    try:
        return read_record(run.sweep, SweepRecord)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"Cannot read the sweep's record {str(run.sweep)!r}: {error}. Restore this file, or submit the "
            "sweep again."
        ) from error
