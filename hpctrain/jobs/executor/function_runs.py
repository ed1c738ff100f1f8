"""Runs whose ranks call a function: submission, results and failures."""

from __future__ import annotations

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
from hpctrain.files import read_json, read_regular
from hpctrain.jobs.backends.base import SubmissionUnconfirmed
from hpctrain.jobs.options.spec_builder import new_run_id
from hpctrain.jobs.options.table import SubmitOptions
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit import submit_prepared
from hpctrain.records.run_record import read_run_record
from hpctrain.records.serialization import CallPayload, FunctionCall
from hpctrain.rundir import RunDir
from hpctrain.text import format_ranks

log = logging.getLogger("hpctrain")

#: Script of every rank. It is started by its path, not imported here, because it needs torch.
_SCRIPT = Path(__file__).resolve().parents[2] / "runtime" / "function_worker.py"

#: Seconds to wait for a file from another host to become visible on this host.
_RESULT_TIMEOUT_S = 30.0


def submit_calls(
    calls: Sequence[FunctionCall],
    options: SubmitOptions,
    *,
    folder: Path,
    at_once: int = 0,
    environ: Mapping[str, str],
    shown_notes: set[str],
) -> tuple[list[Run], int]:
    """Submit calls; several become a job array."""
    # A function that raised an exception is called again only on request.
    again = "max_failures" in options or any(
        kind.startswith("python") for kind in options.get("restart_policy", ())
    )
    parcels = [CallPayload.serialize(call, retry_on_exception=again).to_bytes() for call in calls]
    names = {call.name for call in calls}
    name = options.get("name") or (names.pop() if len(names) == 1 else "functions")
    array = f"0-{len(calls) - 1}" + (f"%{at_once}" if at_once else "") if len(calls) > 1 else ""
    with _new_folder(folder, name) as run_dir:
        submission = prepare_submission(
            _SCRIPT,
            [],
            cast(SubmitOptions, {**options, "name": name, "run_dir": run_dir}),
            # Overrides configuration files: the number of tasks is the number of calls.
            assignments=[f"array={array}"],
            environ=environ,
            cwd=Path.cwd(),
            python=sys.executable,
            code=_program_folder(),
        )
        if not (spec := submission.spec).supervised:
            raise SpecError(
                "Functions run in hpctrain's ranks, which the template 'plain' leaves out (template). Choose "
                "another template."
            )
        if spec.is_elastic:
            raise SpecError(
                f"{spec.min_nodes} to {spec.nodes} nodes were requested (--nodes), but a function returns "
                "one result per rank, so the number of nodes must be fixed. Request a single number, "
                "such as 4."
            )
        for note in submission.notes:
            if note not in shown_notes:
                shown_notes.add(note)
                log.warning(note)
        run = submit_prepared(submission, parcels)
        for prospect in submission.forecast:
            log.info(prospect)
    return run.tasks() or [run], submission.spec.world_size


def _program_folder() -> Path:
    """Return the folder of this program's modules; the current folder for tools such as notebooks."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(os.path.realpath(program)).parent if program else None
    tools = [Path(os.path.realpath(prefix)) for prefix in (sys.prefix, sys.base_prefix)]
    if folder is None or any(folder.is_relative_to(prefix) for prefix in tools):
        return Path.cwd()
    return folder


@contextmanager
def _new_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create a new folder; remove it if the block fails and no job can be queued."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = parent / new_run_id(name)
            with suppress(FileExistsError):
                folder.mkdir(0o755)
                break
    except OSError as error:
        raise SpecError(
            f"Cannot create a run folder in {str(parent)!r} (`folder`): {error.strerror}. Choose "
            "another folder."
        ) from error
    try:
        yield folder
    except Exception as error:
        if not isinstance(error, SubmissionUnconfirmed):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def read_result(run: RunDir, rank: int) -> Any:
    """Return the function's result on a rank of a completed run; wait for a file from another host."""
    path = run.result(int((read_run_record(run).finished or {}).get("attempt", 0)), rank)
    deadline = time.monotonic() + _RESULT_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RunFailed(f"Rank {rank} of run {run.run_id} wrote no result: {path} does not exist.")
        time.sleep(0.2)
    try:
        return pickle.loads(read_regular(path))
    except Exception as error:
        error.add_note(f"while reading the result of rank {rank} from {path}")
        raise


def read_stdout(run: RunDir, ranks: Sequence[int], has_ended: Callable[[], bool]) -> str | None:
    """Return the ranks' output of all attempts, one rank after the other; None if there is none yet."""
    logs = _logs_of(run, ranks)
    is_final = not all(logs.values()) and has_ended()
    if is_final:
        logs = _logs_of(run, ranks)  # A log may have appeared in the meantime.
    texts = [b"".join(map(read_regular, its)).decode(errors="replace") for its in logs.values() if its]
    if is_final and (without := [rank for rank, its in logs.items() if not its]):
        texts.append(_job_output(run, without))
    return "\n".join(texts) if texts else None


def _logs_of(run: RunDir, ranks: Sequence[int]) -> dict[int, list[Path]]:
    """Return the existing logs of each rank, in all attempts."""
    attempts = run.attempts()
    return {
        rank: [log for attempt in attempts if (log := run.rank_log(attempt, rank)).exists()] for rank in ranks
    }


def _job_output(run: RunDir, ranks: list[int]) -> str:
    whose = format_ranks(ranks).capitalize()
    said = f"{whose} of run {run.run_id} wrote no log."
    for path in (run.slurm_log, run.supervisor_log):
        with suppress(OSError):
            if text := read_regular(path).decode(errors="replace"):
                return f"{said} Output of the job ({path}):\n{text}"
    return f"{said} The job printed no output either.\n"


@dataclass(frozen=True)
class FunctionFailure:
    """Cause of the failure of a run, with all details from the run folder."""

    message: str
    rank: int | None
    """The rank that failed first; None if no rank could be started."""
    host: str | None
    log: str | None
    exception: BaseException | None
    """The exception that the function raised, if it could be pickled."""

    @classmethod
    def from_status(cls, status: RunStatus) -> FunctionFailure:
        """Return the failure of a failed run."""
        run = RunDir(Path(status.run_dir))
        told = read_run_record(run).failure or {}
        if told.get("cause") != status.cause:
            told = {}  # That attempt was not the last attempt.
        rank = None if told.get("rank", -1) < 0 else int(told["rank"])
        message = f"Run {status.run_id} failed: {str(status.cause).rstrip('.')}. Log: {status.log}"
        exception = None
        if rank is not None:
            with suppress(OSError, ValueError, KeyError):
                record = read_json(run.failure(told["attempt"], rank))
                message += f"\n\n{record['traceback']}".rstrip()
            # Unpickling runs code of the exception's class, which may not exist on this machine.
            with suppress(Exception):
                exception = pickle.loads(read_regular(run.exception_pickle(told["attempt"], rank)))
        return cls(message, rank, told.get("host"), status.log, exception)


def read_call(run: RunDir) -> FunctionCall:
    """Return the function call that the ranks of the run execute."""
    return CallPayload.read(run.function).deserialize()
