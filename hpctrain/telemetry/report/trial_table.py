"""Table of runs by their hyper-parameters, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.run_results import common_ranking, find_best, rank_key
from hpctrain.text import NOTHING, format_count, format_number


@dataclass(frozen=True)
class TrialTable:
    """Table of runs, best first."""

    titles: list[str]
    rows: list[list[str]]


def best_first(runs: Sequence[RunData]) -> list[RunData]:
    """Sort runs by the best values of their common metric, if their hyper-parameters differ."""
    ranking = common_ranking(run.best for run in runs)
    if ranking[0] is None or not varying_hparams([run.hparams for run in runs]):
        return list(runs)
    folders = [RunDir(Path(run.folder)) for run in runs]
    ranked = [
        run
        if run.best and (run.best.metric, run.best.mode) == ranking
        else replace(run, best=find_best(folder.checkpoints, run.curves, run.environment, *ranking))
        for run, folder in zip(runs, folders, strict=True)
    ]
    return sorted(ranked, key=lambda run: rank_key(run.best))


def make_trial_table(ordered: Sequence[RunData]) -> TrialTable | None:
    """Return the table of runs, as sorted by `best_first`; None if no hyper-parameters differ."""
    names = varying_hparams([run.hparams for run in ordered])
    if not names:
        return None
    best = ordered[0].best

    def value_of(run: RunData) -> float | None:
        return run.best.value if run.best else None

    metric = f"{best.metric} (best)" if best is not None else "best"
    rows = [
        [
            run.run_id,
            run.state,
            *(format_setting(run.hparams[name]) if name in run.hparams else NOTHING for name in names),
            format_number(value_of(run)),
            format_count(run.best.step) if value_of(run) is not None and run.best else NOTHING,
        ]
        for run in ordered
    ]
    return TrialTable(["run", "state", *names, metric, "at step"], rows)
