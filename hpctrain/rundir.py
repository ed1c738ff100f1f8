"""Paths of all files of a run, and the event log of the run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpctrain import system
from hpctrain.errors import UserError
from hpctrain.files import IsValid, append_json_line, make_folder, read_json_lines, read_regular, write_atomic

EventKind = Literal[
    "submitted",
    "started",
    "staged",
    "startup",
    "resumed",
    "checkpoint",
    "memory_copy",
    "bad_loss",
    "signal",
    "failure",
    "restart",
    "shrink",
    "replace",
    "grow",
    "excluded",
    "straggler",
    "paused",
    "requeue",
    "handover",
    "chaos",
    "seen",
    "finished",
]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 2**53  # type: ignore[arg-type]


def _is_time(value: object) -> bool:
    # Python's calendar ends with the year 9999.
    return _is_number(value) and 0 <= value < 253_402_300_800  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


#: Checks of the event fields that readers require; an existing field must pass its check.
_FIELDS: dict[str, Callable[[object], bool]] = {
    "time": _is_time,
    "attempt": _is_count,
    # A failure without a rank has rank -1 or none.
    "rank": lambda value: value is None or value == -1 or _is_count(value),
    "step": lambda value: value is None or _is_count(value),
    **dict.fromkeys(
        ("nodes", "nodes_before", "world_size", "exit_code", "micro_batch_size", "verified_step"), _is_count
    ),
    **dict.fromkeys(("hosts", "broken"), lambda value: isinstance(value, list) and all(map(_is_text, value))),
    "ranks": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    **dict.fromkeys(("kind", "job_id", "backend", "job_state", "state", "after", "memory"), _is_text),
    **dict.fromkeys(
        ("host", "cause", "log", "path", "tier", "by", "class", "device"),
        lambda value: value is None or _is_text(value),
    ),
}
#: Required fields of each kind of event.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "submitted": ("time", "job_id", "backend"),
    "seen": ("job_id", "job_state"),
    "handover": ("job_id",),
    "excluded": ("hosts",),
    "paused": ("attempt", "rank", "seconds"),
    "finished": ("time", "state"),
}


def is_event(record: Mapping[str, Any]) -> bool:
    """True if a line of `events.jsonl` has valid values in all fields that readers of its kind require."""
    kind = record.get("kind")
    return (
        isinstance(kind, str)
        and all(name in record for name in _REQUIRED.get(kind, ()))
        and all(name not in _FIELDS or _FIELDS[name](value) for name, value in record.items())
        and (kind != "requeue" or _is_number(record.get("seconds", 0.0)))
    )


def is_metrics(record: Mapping[str, Any]) -> bool:
    """True if a line of `metrics.jsonl` has valid values in the fields that hpctrain requires."""
    return (
        _is_count(record.get("step", 0))
        and _is_count(record.get("attempt", 0))
        and _is_time(record.get("time", 0))
    )


def is_new_submission(event: Mapping[str, Any]) -> bool:
    """True for a submission by the user; a successor job continues the previous submission."""
    return event.get("kind") == "submitted" and "after" not in event


#: The run folder of a rank, and its attempt.
RUN_DIR_VARIABLE = "HPCTRAIN_RUN_DIR"
ATTEMPT_VARIABLE = "HPCTRAIN_ATTEMPT"
#: Grace time of the ranks after each stop signal, in seconds: `SIGTERM=30,SIGUSR2=120`.
STOP_GRACE_VARIABLE = "HPCTRAIN_STOP_GRACE"
#: Key in that variable for a requeue requested by the user, with any signal.
REQUEUE_GRACE_KEY = "requeue"
#: Mean time between two interruptions of a node, in seconds, as estimated by the site.
NODE_MTBF_VARIABLE = "HPCTRAIN_NODE_MTBF_S"
#: The job array task that a rank belongs to.
ARRAY_TASK_VARIABLE = "HPCTRAIN_ARRAY_TASK_ID"
#: The copy of the code that a rank runs, and the working tree that was copied.
CODE_VARIABLE = "HPCTRAIN_CODE_DIR"
CODE_SOURCE_VARIABLE = "HPCTRAIN_CODE_SOURCE"
#: Folder on the node's local disk with the staged files (`--stage`), by name.
STAGE_VARIABLE = "HPCTRAIN_STAGE"
#: Names of the staged Python environment and code in that folder.
STAGED_ENVIRONMENT, STAGED_CODE = ".environment", ".code"
#: Names of archives, which `--stage` unpacks.
ARCHIVE_SUFFIX = re.compile(r"\.(zip|(tar(\.(gz|bz2|xz|zst))?)|t(gz|bz2|xz|zst))$")
#: A pipe whose other end the local supervisor holds, and which closes on any exit of the supervisor.
LIFELINE_VARIABLE = "HPCTRAIN_LIFELINE_FD"
#: The address on which the supervisor listens for its ranks: ADDRESS:PORT:TOKEN.
SUPERVISOR_ADDRESS_VARIABLE = "HPCTRAIN_SUPERVISOR_ADDRESS"
#: Final state of a trial that a sweep stopped early.
STOPPED_EARLY = "STOPPED_EARLY"
#: Prefix for passing a variable of `--env` without its value on a command line.
ENV_PREFIX = "HPCTRAIN_ENV_"
#: Modules, in JSON, that a standby worker imports before waiting for the start command.
STANDBY_VARIABLE = "HPCTRAIN_STANDBY"
#: 0 disables the measurements of nodes.
TELEMETRY_VARIABLE = "HPCTRAIN_TELEMETRY"
#: Ascending steps to save, separated by commas; the run ends after the last one. Set by `hpctrain verify`.
VERIFY_STEPS_VARIABLE = "HPCTRAIN_VERIFY_STEPS"
#: Steps at which the verified run synchronized its ranks for a checkpoint, in the same form.
VERIFY_SYNC_STEPS_VARIABLE = "HPCTRAIN_VERIFY_SYNC_STEPS"
#: 1 if the ranks of the run do not train together.
INDEPENDENT_RANKS_VARIABLE = "HPCTRAIN_INDEPENDENT_RANKS"
#: Maximum number of samples in a micro-batch, because an earlier attempt ran out of GPU memory.
MICRO_BATCH_VARIABLE = "HPCTRAIN_MAX_MICRO_BATCH"
#: The last verified step, after wrong results were detected: the attempt resumes at most from this step.
VERIFIED_STEP_VARIABLE = "HPCTRAIN_VERIFIED_STEP"
#: Variables of an attempt that result from the attempts before.
HISTORY_VARIABLES = (MICRO_BATCH_VARIABLE, VERIFIED_STEP_VARIABLE)
#: `none` disables the binding of ranks to CPUs.
CPU_BINDING_VARIABLE = "HPCTRAIN_CPU_BINDING"
#: In a process of a command: the ranks of its worker, and the name of the worker's socket, as JSON.
CHILD_VARIABLE = "HPCTRAIN_COMMAND"
#: The predecessor of this job, on sites without requeue.
PREDECESSOR_VARIABLE = "HPCTRAIN_PREDECESSOR"
#: Number of GPUs of each process, if it has several.
GPUS_PER_TASK_VARIABLE = "HPCTRAIN_GPUS_PER_TASK"
#: Process of a local batch script that runs commands after the supervisor.
BATCH_PID_VARIABLE = "HPCTRAIN_BATCH_PID"

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_ATTEMPT_FOLDER = re.compile(r"attempt-(\d{3,})")
_RANK_LOG = re.compile(r"rank-(\d{5,})\.log")
_CODE_FOLDER = re.compile(r"submission-(\d{3,})")
_TASK_FOLDER = re.compile(r"task-(\d+)")
_LEASE = re.compile(r"(\d{6,})")


class RunStorage:
    """Writes the files of a run. The supervisor uses an implementation that tolerates a full disk."""

    pending_reason: str | None = None
    """Reason for delayed writes; None if no data is buffered."""

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        append_json_line(path, record)

    def read(self, path: Path, is_valid: IsValid) -> Iterator[dict[str, Any]]:
        """Yield the JSON lines of a file. Damaged lines are skipped with a warning."""
        return read_json_lines(path, is_valid)

    def write(self, path: Path, content: str) -> None:
        make_folder(path.parent)
        write_atomic(path, content)

    def make_folder(self, path: Path) -> None:
        """Create a new folder; raise `FileExistsError` if it exists."""
        for parent in (path.parent.parent, path.parent):
            make_folder(parent)
        path.mkdir(0o755)

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder; empty if it does not exist."""
        try:
            return [entry.name for entry in folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []


class _FixedPath:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _kind: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """The folder of a run. Contains only paths; no property creates a file."""

    path: Path
    storage: RunStorage = field(default=RunStorage(), compare=False)

    spec = _FixedPath("spec.yaml")
    """The specification of the job."""
    job_script = _FixedPath("job.sbatch")
    """The job script as submitted to the scheduler."""
    sweep = _FixedPath("sweep.json")
    """The record of a sweep, in the folder of its job array."""
    git_ignore = _FixedPath(".gitignore")
    """Excludes the run from the enclosing Git repository, and from copies of the code."""
    code = _FixedPath("code")
    """Copies of the code, each with a record of its source."""
    report = _FixedPath("report.html")
    """The report of the run, a single HTML page."""
    function = _FixedPath("function.pkl")
    """The function that every rank calls, for runs without a script. Written once."""
    resume_call = _FixedPath("next_call.pkl")
    """The call for later attempts, returned by the `checkpoint` method of the function."""
    events = _FixedPath("events.jsonl")
    metrics = _FixedPath("metrics.jsonl")
    environment = _FixedPath("environment.jsonl")
    """The environment of each attempt, and the settings of its training."""
    logs = _FixedPath("logs")
    supervisor_log = _FixedPath("logs/supervisor.log")
    """The actions of the supervisor, with their reasons."""
    slurm_log = _FixedPath("logs/slurm.log")
    """Output of the batch script and of Slurm."""
    lock = _FixedPath("supervisor.lock")
    """Lock held by the submission and, on the local backend, by the running supervisor."""
    phase_durations = _FixedPath("phase_durations.json")
    """The longest durations in the run, which determine the time limits for hangs."""
    cancel_request = _FixedPath("cancel-requested")
    """Exists after a cancel request: once the state is saved, the run ends without a requeue."""
    early_stopping = _FixedPath("early_stopping.jsonl")
    """The values used to compare the trials of a sweep and stop losing trials."""
    requeue_request = _FixedPath("requeue-requested")
    """The attempt to save and requeue, as requested by the user."""
    profile_request = _FixedPath("profile-requested")
    """A profile requested by the user. The supervisor removes the file when it sends the request."""
    checkpoints = _FixedPath("checkpoints")
    failures = _FixedPath("failures")

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def array(self) -> RunDir | None:
        """The folder of the job array of this task; None if this is not a task."""
        is_task = _TASK_FOLDER.fullmatch(self.path.name)
        return RunDir(self.path.parent, self.storage) if is_task else None

    @property
    def run_id(self) -> str:
        """The name of the folder; for a job array task, preceded by the name of the array."""
        return f"{self.path.parent.name}/{self.path.name}" if self.array else self.path.name

    def last_activity(self) -> float:
        """Return the time of the run's last write in seconds since the epoch; 0 without a write."""
        files = [self.events, self.metrics, self.slurm_log, self.supervisor_log]
        if attempts := self.attempts():
            files.append(self.rank_log(attempts[-1], 0))
        times = [0.0]
        for path in files:
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def new_code(self) -> Path:
        """Return the path for the code of a new submission."""
        return self.code / f"submission-{max(_numbered(self.code, _CODE_FOLDER), default=-1) + 1:03d}"

    def telemetry(self, node: int) -> Path:
        """Return the file with the measurements of a node and its GPUs."""
        return self.path / "telemetry" / f"node-{node:03d}.jsonl"

    def all_telemetry(self) -> list[Path]:
        return sorted((self.path / "telemetry").glob("node-*.jsonl"))

    def logger_state(self, name: str) -> Path:
        """Return the file with a logger's progress and the tracker's id of the run."""
        return self.path / "loggers" / f"{name}.json"

    def early_stop_reason(self) -> str | None:
        """Return the reason if the cancel request is from early stopping; None if it is from the user."""
        try:
            return read_regular(self.cancel_request).decode(errors="replace").strip() or None
        except OSError:
            return None

    def profile(self, number: int) -> Path:
        """Return the folder of a profile."""
        return self.path / "profiles" / f"{number:03d}"

    def new_profile(self) -> int:
        """Reserve the number of a new profile by creating its folder."""
        return self._reserve(len(self.storage.names(self.path / "profiles")), self.profile)

    def profile_trace(self, number: int, rank: int) -> Path:
        """Return the file with a rank's trace in Chrome's format."""
        return self.profile(number) / f"rank-{rank:05d}.trace.json.gz"

    def profile_result(self, number: int, rank: int) -> Path:
        """Return the file with a rank's most expensive operators, or its error. Written last."""
        return self.profile(number) / f"rank-{rank:05d}.json"

    def is_asked_to_requeue(self, attempt: int) -> bool:
        """True if the user requested a requeue of this attempt, so the end of the job is not imminent."""
        try:
            return read_regular(self.requeue_request) == f"{attempt}\n".encode()
        except OSError:
            return False

    def successor_claim(self, job_id: str) -> Path:
        """Return the file with the id of the successor of `job_id`. Only the first writer creates it."""
        return self.path / "chain" / f"after-{job_id}"

    def successor_script(self, job_id: str) -> Path:
        """Return the link to the batch script with which the successor of `job_id` is submitted."""
        return self.path / "chain" / f"continues-job-{job_id}"

    def lease(self, number: int) -> Path:
        """Return the file of a lease. Under Slurm, only the supervisor with the highest number may train."""
        return self.path / "lease" / f"{number:06d}"

    def leases(self) -> list[int]:
        return _numbered(self.path / "lease", _LEASE)

    def node_check_result(self, attempt: int, rank: int) -> Path:
        return self.path / "checks" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.json"

    def node_check_results(self, attempt: int) -> list[Path]:
        return sorted(self.node_check_result(attempt, 0).parent.glob("rank-*.json"))

    def staging_result(self, attempt: int, node: int) -> Path:
        """Return the file with the result of staging on a node, which the supervisor removes."""
        return self.path / "staging" / f"attempt-{attempt:03d}" / f"node-{node:05d}.json"

    def staged_environment(self, job_id: str) -> Path:
        """Return the file with the path of the packed Python environment that all attempts of a job use."""
        return self.path / "staging" / f"environment-{job_id}"

    def memory_errors(self, host: str, local_rank: int) -> Path:
        """Return the file with the GPU memory errors from before the job, recorded at its first check."""
        return self.path / "checks" / f"memory-errors-{host}-{local_rank:03d}.json"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.log"

    def agent_log(self, attempt: int, node: int) -> Path:
        """Return the log of a node's torchrun agent, if torchrun starts the ranks."""
        return self.attempt_logs(attempt) / f"agent-{node:05d}.log"

    def ranks(self, attempt: int) -> list[int]:
        """Return the ranks with a log in this attempt, ascending."""
        return _numbered(self.attempt_logs(attempt), _RANK_LOG)

    def log_index(self, attempt: int, node: int) -> Path:
        """Return the file with the lengths over time of the logs of a node's ranks."""
        return self.attempt_logs(attempt) / f"times-{node:05d}.jsonl"

    def all_log_indexes(self, attempt: int) -> list[Path]:
        return sorted(self.attempt_logs(attempt).glob("times-*.jsonl"))

    def failure(self, attempt: int, rank: int) -> Path:
        return self.failures / f"attempt-{attempt:03d}-rank-{rank:05d}.json"

    def stacks(self, attempt: int, rank: int) -> Path:
        """Return the file with the thread stacks of a rank at a hang."""
        return self.failures / f"attempt-{attempt:03d}-stacks-{rank:05d}.txt"

    def collectives(self, attempt: int, rank: int) -> Path:
        """Return the file with a rank's collectives before a hang, from torch's flight recorder."""
        return self.failures / f"attempt-{attempt:03d}-collectives-{rank:05d}.json"

    def hung_gpus(self, attempt: int, node: int) -> Path:
        """Return the file with the state of a node's GPUs at a hang."""
        return self.failures / f"attempt-{attempt:03d}-gpus-{node:03d}.json"

    def exception_pickle(self, attempt: int, rank: int) -> Path:
        """Return the file with the pickled exception of a failure, if it could be pickled."""
        return self.failure(attempt, rank).with_suffix(".pkl")

    def unfinished_marker(self, attempt: int, rank: int, key: str) -> Path:
        """Return a file that exists while a rank is training; `key` represents its output folder."""
        return self.path / "unfinished" / f"attempt-{attempt:03d}-rank-{rank:05d}-{key}.json"

    def unfinished_files(self, attempt: int) -> list[Path]:
        """Return the existing files of all ranks, in rank order."""
        rank = "[0-9]" * 5
        return sorted((self.path / "unfinished").glob(f"attempt-{attempt:03d}-rank-{rank}-*.json"))

    def result(self, attempt: int, rank: int) -> Path:
        """Return the file with the return value of the function on this rank."""
        return self.path / "results" / f"attempt-{attempt:03d}-rank-{rank:05d}.pkl"

    def failure_files(self, attempt: int) -> list[Path]:
        """Return the files of the failed ranks in the attempt."""
        return sorted(self.failures.glob(f"attempt-{attempt:03d}-rank-*.json"))

    def samples(self, attempt: int, rank: int) -> Path:
        return self.path / "samples" / f"attempt-{attempt:03d}-rank-{rank:05d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_folder_name(step)

    def task(self, index: int | str) -> RunDir:
        """Return the folder of a job array task: a complete run folder inside the folder of the array."""
        return RunDir(self.path / f"task-{index}", self.storage)

    def tasks(self) -> list[int]:
        """Return the task numbers of a job array, ascending; empty for a single run."""
        return _numbered(self.path, _TASK_FOLDER)

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts, ascending."""
        return _numbers(self.storage.names(self.logs), _ATTEMPT_FOLDER)

    def new_attempt(self) -> int:
        """Reserve the number of a new attempt by creating its log folder."""
        return self._reserve(max(self.attempts(), default=-1) + 1, self.attempt_logs)

    def _reserve(self, number: int, folder: Callable[[int], Path]) -> int:
        """Create the folder of the first free number, and return this number."""
        while True:
            try:
                self.storage.make_folder(folder(number))
            except FileExistsError:
                number += 1
            else:
                return number

    def log_event(self, kind: EventKind, attempt: int, **fields: Any) -> None:
        """Append an event to the run's event log, with the time in seconds since the epoch."""
        self.storage.append(self.events, event_record(kind, attempt, **fields))

    def write(self, path: Path, content: str) -> None:
        self.storage.write(path, content)

    def check_records(self) -> None:
        """Check that the run's events and metrics can be recorded."""
        for path in (self.events, self.metrics):
            if path.exists() and not path.is_file():
                raise UserError(
                    f"{path} is not a regular file, so hpctrain cannot record the run. Move or delete "
                    f"{path.name}, then start the run again."
                )

    def read_events(self) -> Iterator[dict[str, Any]]:
        """Yield the recorded events. Damaged lines are skipped with a warning."""
        return self.storage.read(self.events, is_event)


def output_folder(run_dir: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> str | None:
    """Return the folder for the output of training: the script's choice, otherwise the run folder.

    A verification must not write to the folder that the script chose: it belongs to the verified run.
    """
    run_folder = environ.get(RUN_DIR_VARIABLE)
    return run_folder if VERIFY_STEPS_VARIABLE in environ or not run_dir else os.fspath(run_dir)


def event_record(kind: EventKind, attempt: int, **fields: Any) -> dict[str, Any]:
    """Return a record of an event at the current time."""
    return {"time": system.time(), "attempt": attempt, "kind": kind, **fields}


def checkpoint_folder_name(step: int) -> str:
    """Return the name of the folder for the state after `step` optimizer steps."""
    return f"step-{step:08d}"


def list_checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps with a checkpoint folder in `folder`, ascending, without checking their content."""
    return _numbered(folder, _STEP_FOLDER)


def rank_steps(scores: Mapping[int, float | None], mode: str) -> list[int]:
    """Return the steps with a score, best first. None and NaN never count.

    Of equal scores, the newer one is better, because it was trained longer.
    """
    valid = {step: score for step, score in scores.items() if score is not None and not math.isnan(score)}
    sign = -1 if mode == "max" else 1
    return sorted(valid, key=lambda step: (sign * valid[step], -step))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    return _numbers(RunStorage().names(folder), pattern)


def _numbers(names: Iterable[str], pattern: re.Pattern[str]) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
