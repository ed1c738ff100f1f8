"""Runs whose ranks call a function: their submission, what the function returned, and how it failed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hpctrain.errors import RunFailed, SpecError
from hpctrain.jobs.backends import SubmissionUnclear
from hpctrain.jobs.build import new_run_id
from hpctrain.jobs.error_report import name_ranks
from hpctrain.jobs.options import SubmitOptions
from hpctrain.jobs.prepare import prepare
from hpctrain.jobs.record import read_record
from hpctrain.jobs.runs import Run
from hpctrain.jobs.status import RunStatus
from hpctrain.jobs.submit import hand_over
from hpctrain.pickles import Call, Parcel
from hpctrain.rundir import RunDir

log = logging.getLogger("hpctrain")

#: What every rank runs. It is started by its path, and not imported here: it needs torch.
_SCRIPT = Path(__file__).resolve().parents[1] / "runtime" / "function.py"

#: A file of another host may be seen a while after its name was heard of.
_RESULT_PATIENCE_S = 30.0


def submit_calls(
    calls: Sequence[Call],
    options: SubmitOptions,
    *,
    folder: Path,
    at_once: int = 0,
    environ: Mapping[str, str],
    told: set[str],
) -> tuple[list[Run], int]:
    """Submit calls, several of them as a job array.

    Args:
        calls: what to call; each is a run of its own.
        options: what to ask for.
        folder: where to make the folder of the run or of the array.
        at_once: how many tasks of the array may run at once; 0 leaves it to the backend.
        environ: the variables of the submission.
        told: notes for the user that were given before; gets those that are given now.

    Returns:
        The run of each call, and the number of ranks that each has.

    Raises:
        UserError: a function or an argument cannot be pickled, or the job cannot be done as asked.
        SchedulerError: the scheduler refused, or cannot be reached.
    """
    # A function that raised is called again only where somebody asked for it.
    again = "max_failures" in options or "restart" in options
    parcels = [Parcel.pack(call, again=again).to_bytes() for call in calls]
    names = {call.name for call in calls}
    name = options.get("name") or (names.pop() if len(names) == 1 else "functions")
    array = f"0-{len(calls) - 1}" + (f"%{at_once}" if at_once else "") if len(calls) > 1 else ""
    with _new_folder(folder, name) as run_dir:
        submission = prepare(
            _SCRIPT,
            [],
            cast(SubmitOptions, {**options, "name": name, "run_dir": run_dir}),
            # Over what a file of options may say: how many tasks there are is how many calls.
            assignments=[f"array={array}"],
            environ=environ,
            cwd=Path.cwd(),
            python=sys.executable,
            code=_program_folder(),
        )
        if (spec := submission.spec).is_elastic:
            raise SpecError(
                f"{spec.min_nodes} to {spec.nodes} nodes are asked for (--nodes) for a function, but its "
                "results are those of a number of ranks that is known beforehand. Give one number of nodes."
            )
        for note in submission.notes:
            if note not in told:
                told.add(note)
                log.warning(note)
        run = hand_over(submission, parcels)
        for prospect in submission.prospects:
            log.info(prospect)
    return run.tasks() or [run], submission.spec.world_size


def _program_folder() -> Path:
    """Where the modules of this program lie: beside it, or here where it is a tool such as a notebook's."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(os.path.realpath(program)).parent if program else None
    tools = [Path(os.path.realpath(prefix)) for prefix in (sys.prefix, sys.base_prefix)]
    if folder is None or any(folder.is_relative_to(prefix) for prefix in tools):
        return Path.cwd()
    return folder


@contextmanager
def _new_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make a folder that is nobody else's. It goes again where the block fails and no job may be queued.

    Raises:
        SpecError: none can be made there.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = parent / new_run_id(name)
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise SpecError(
            f"No run folder can be made in {str(parent)!r} (`folder`): {error.strerror}. Choose another."
        ) from error
    try:
        yield folder
    except Exception as error:
        if not isinstance(error, SubmissionUnclear):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def read_result(run: RunDir, rank: int) -> Any:
    """What the function returned in a rank of a completed run. Another host may just have written it.

    Raises:
        RunFailed: there is no result.
    """
    path = run.result(int((read_record(run).finished or {}).get("attempt", 0)), rank)
    deadline = time.monotonic() + _RESULT_PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RunFailed(f"Rank {rank} of run {run.run_id} has left no result: {path} is not there.")
        time.sleep(0.2)
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:
        error.add_note(f"while reading the result of rank {rank}, {path}")
        raise


def read_printed(run: RunDir, ranks: Sequence[int], has_ended: Callable[[], bool]) -> str | None:
    """What ranks have printed, in all attempts, one after the other; None where that is nothing yet.

    Args:
        run: the run.
        ranks: whose.
        has_ended: whether the run has ended. A rank that has no log by then will begin none, so what the job
            itself has printed is given in its place, once for all of them.
    """
    logs = _logs_of(run, ranks)
    is_final = not all(logs.values()) and has_ended()
    if is_final:
        logs = _logs_of(run, ranks)  # One may have come in between.
    texts = ["".join(log.read_text(errors="replace") for log in its) for its in logs.values() if its]
    if is_final and (without := [rank for rank, its in logs.items() if not its]):
        texts.append(_in_place_of_logs(run, without))
    return "\n".join(texts) if texts else None


def _logs_of(run: RunDir, ranks: Sequence[int]) -> dict[int, list[Path]]:
    """The logs that each rank has begun, in all attempts."""
    attempts = run.attempts()
    return {
        rank: [log for attempt in attempts if (log := run.rank_log(attempt, rank)).exists()] for rank in ranks
    }


def _in_place_of_logs(run: RunDir, ranks: list[int]) -> str:
    whose = name_ranks(ranks).capitalize()
    said = f"{whose} of run {run.run_id} began no log."
    for path in (run.slurm_log, run.supervisor_log):
        with suppress(OSError):
            if text := path.read_text(errors="replace"):
                return f"{said} What the job itself printed ({path}):\n{text}"
    return f"{said} The job itself printed nothing either.\n"


@dataclass(frozen=True)
class FunctionFailure:
    """Why a run failed, with all that its folder knows of it."""

    message: str
    rank: int | None
    """The rank that failed first; None where no rank could be started."""
    host: str | None
    log: str | None
    exception: BaseException | None
    """What the function raised, where that could be pickled."""

    @classmethod
    def of(cls, status: RunStatus) -> FunctionFailure:
        """The failure of a run that has failed."""
        run = RunDir(Path(status.run_dir))
        told = read_record(run).failure or {}
        if told.get("cause") != status.cause:
            told = {}  # That attempt was not the last one.
        rank = None if told.get("rank", -1) < 0 else int(told["rank"])
        message = f"Run {status.run_id} failed: {str(status.cause).rstrip('.')}. Log: {status.log}"
        exception = None
        if rank is not None:
            with suppress(OSError, ValueError, KeyError):
                record = json.loads(run.failure(told["attempt"], rank).read_text(encoding="utf-8"))
                message += f"\n\n{record['traceback']}".rstrip()
            # Unpickling runs code of the exception's class, which may not even be there.
            with suppress(Exception):
                exception = pickle.loads(run.raised(told["attempt"], rank).read_bytes())
        return cls(message, rank, told.get("host"), status.log, exception)


def read_call(run: RunDir) -> Call:
    """What the run's ranks call."""
    return Parcel.read(run.function).open()
