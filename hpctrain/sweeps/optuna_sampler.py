"""Trials chosen by Optuna: when a trial starts, its values are chosen from the results of finished trials."""

from __future__ import annotations

import json
import os
import random
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UserError
from hpctrain.files import create_atomic, own_file, read_json
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.sweeps.search_space import SearchSpace, TrialValues, ValueRange
from hpctrain.sweeps.sweep_record import SweepRecord
from hpctrain.telemetry.report.run_results import read_results

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

_STUDY = "sweep"


def check_optuna_installed() -> None:
    """Raise `UserError` if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise UserError("Optuna is not installed (--optuna). Run `pip install optuna`.")


def choose_values(trial: RunDir, sweep: SweepRecord) -> TrialValues:
    """Return the values of a trial. The first call asks Optuna, and records the values in the trial's folder.

    Raises:
        UserError: Optuna is not installed, or the record of the values is damaged.
    """
    if not trial.optuna_trial.exists():
        check_optuna_installed()
        _ask(trial, sweep)
    return _read(trial)[1]


def _ask(trial: RunDir, sweep: SweepRecord) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    assert trial.array is not None
    journal = trial.array.optuna_journal
    open(journal, "ab", opener=own_file).close()  # Optuna would create it with the umask.
    lock = JournalFileSymlinkLock(str(journal))  # also works on NFS
    lock.acquire()
    try:
        _truncate_incomplete_line(journal)
    finally:
        lock.release()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = random.Random(f"{sweep.seed}:{trial.path.name}").getrandbits(32)
    study = optuna.create_study(
        study_name=_STUDY,
        storage=JournalStorage(JournalFileBackend(str(journal), lock_obj=lock)),
        direction="maximize" if sweep.mode == "max" else "minimize",
        # Trials that are still running count as bad ones, so that concurrent trials do not try the same.
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        load_if_exists=True,
    )
    _add_results(study, trial.array, sweep)
    asked = study.ask(_distributions(sweep.parsed_space))
    values = {n: f"{v:.6g}" if isinstance(v, float) else str(v) for n, v in asked.params.items()}
    content = json.dumps({"number": asked.number, "values": values}).encode()
    # If another job of this trial was faster, its values count.
    create_atomic(trial.optuna_trial, content, f"{os.uname().nodename}-{threading.get_native_id()}")


def _truncate_incomplete_line(journal: Path) -> None:
    """Remove an incomplete last line, which a full disk leaves and Optuna could not read."""
    with open(journal, "r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _add_results(study: Study, array: RunDir, sweep: SweepRecord) -> None:
    """Add the results of the trials that have finished since the last call."""
    from optuna.exceptions import UpdateFinishedTrialError

    known = {trial.number for trial in study.trials if trial.state.is_finished()}
    for trial in map(array.task, array.tasks()):
        if not trial.optuna_trial.exists() or (number := _read(trial)[0]) in known:
            continue
        ends = [event["state"] for event in trial.read_events() if event["kind"] == "finished"]
        # A failed or cancelled trial can be resumed.
        if ends and ends[-1] in ("COMPLETED", STOPPED_EARLY):
            best = read_results(trial, sweep.metric, sweep.mode or "min").best
            if best is not None:
                # Another trial that starts now may be faster, even after the check of this call.
                with suppress(UpdateFinishedTrialError):
                    study.tell(number, best.value, skip_if_finished=True)


def _read(trial: RunDir) -> tuple[int, TrialValues]:
    """Return the number of a trial in Optuna's storage, and its values."""
    try:
        record = read_json(trial.optuna_trial)
        return int(record["number"]), {name: str(value) for name, value in record["values"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(
            f"Cannot read the trial's values in {str(trial.optuna_trial)!r}: {error}. Restore this file."
        ) from error


def _distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for name, values in space.items():
        if not isinstance(values, ValueRange):
            found[name] = CategoricalDistribution(values)
        elif values.is_integer:
            found[name] = IntDistribution(int(values.low), int(values.high), log=values.is_log)
        else:
            found[name] = FloatDistribution(values.low, values.high, log=values.is_log)
    return found
