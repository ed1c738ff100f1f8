"""Define the paths of all files of a run, and the fields of its events."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec

from hpctrain import system
from hpctrain.errors import UserError
from hpctrain.files import append_json_line, make_folder, read_regular, write_atomic

if TYPE_CHECKING:
    from hpctrain.record_types import Event

P = ParamSpec("P")

EventKind = Literal[
    "submitted", "started", "staged", "startup", "resumed", "checkpoint", "memory_copy", "bad_loss",
    "signal", "failure", "restart", "shrink", "replace", "grow", "excluded", "straggler", "paused",
    "requeue", "handover", "chaos", "seen", "finished", "ranks",
]  # fmt: skip


#: The run folder of a rank, and its attempt.
RUN_DIR_VARIABLE = "HPCTRAIN_RUN_DIR"
ATTEMPT_VARIABLE = "HPCTRAIN_ATTEMPT"
#: Grace time of the ranks after each stop signal, in seconds: `SIGTERM=30,SIGUSR2=120`.
STOP_GRACE_VARIABLE = "HPCTRAIN_STOP_GRACE"
#: Key in that variable for a requeue requested by the user, with any signal.
REQUEUE_GRACE_KEY = "requeue"
#: Key for a cancellation by the user.
CANCEL_GRACE_KEY = "cancel"
#: Mean time between two interruptions of a node, in seconds, as estimated by the site.
NODE_MTBF_VARIABLE = "HPCTRAIN_NODE_MTBF_S"
#: Pattern of the files that a script without the `Trainer` saves as checkpoints.
CHECKPOINTS_VARIABLE = "HPCTRAIN_CHECKPOINTS"
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
_RANK_LOG = re.compile(r"rank-(\d{5,})(?:-(\d+))?\.log")
_CODE_FOLDER = re.compile(r"submission-(\d{3,})")
_TASK_FOLDER = re.compile(r"task-(\d+)")
_LEASE = re.compile(r"(\d{6,})")


class RunStorage:
    """Writes the files of a run. The supervisor uses an implementation that tolerates a full disk."""

    pending_reason: str | None = None
    """Reason for delayed writes; None if no data is buffered."""

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        append_json_line(path, record)

    def read_events(self, path: Path) -> Iterator[Event]:
        """Yield the events in a file. Damaged lines are skipped with a warning."""
        from hpctrain.record_types import Event, read_records

        return read_records(path, Event)

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


class _NumberedPath(Generic[P]):
    """Method that inserts its arguments, such as the numbers of an attempt and a rank, into a path."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get__(self, run: RunDir, _kind: type[RunDir]) -> Callable[P, Path]:
        def path(*values: P.args, **_: P.kwargs) -> Path:
            return run.path / self._pattern.format(*values)

        return path


@dataclass(frozen=True)
class RunDir:
    """The folder of a run. Contains only paths; no property creates a file."""

    path: Path
    storage: RunStorage = field(default=RunStorage(), compare=False)

    spec = _FixedPath("spec.yaml")
    job_script = _FixedPath("job.sbatch")
    batch_script = _FixedPath("adopted.sbatch")
    """A copy of the user's batch script, which the supervisor runs."""
    sweep = _FixedPath("sweep.json")
    """The record of a sweep, in the folder of its job array."""
    git_ignore = _FixedPath(".gitignore")
    """Excludes the run from the enclosing Git repository, and from copies of the code."""
    code = _FixedPath("code")
    """Copies of the code, each with a record of its source."""
    report = _FixedPath("report.html")
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
    compile_cache = _FixedPath("compile-cache")
    """Code that `torch.compile` generated, for later attempts."""
    failures = _FixedPath("failures")

    attempt_logs = _NumberedPath[[int]]("logs/attempt-{:03d}")
    rank_log = _NumberedPath[[int, int]]("logs/attempt-{:03d}/rank-{:05d}.log")
    own_log = _NumberedPath[[int, int, int]]("logs/attempt-{:03d}/rank-{:05d}-{}.log")
    """Link to a file to which a rank of a batch script writes; numbered, because several ranks are rank 0."""
    agent_log = _NumberedPath[[int, int]]("logs/attempt-{:03d}/agent-{:05d}.log")
    """The log of a node's torchrun agent, if torchrun starts the ranks."""
    log_index = _NumberedPath[[int, int]]("logs/attempt-{:03d}/times-{:05d}.jsonl")
    failure = _NumberedPath[[int, int]]("failures/attempt-{:03d}-rank-{:05d}.json")
    exception_pickle = _NumberedPath[[int, int]]("failures/attempt-{:03d}-rank-{:05d}.pkl")
    """The pickled exception of a failure, if it could be pickled."""
    stacks = _NumberedPath[[int, int]]("failures/attempt-{:03d}-stacks-{:05d}.txt")
    collectives = _NumberedPath[[int, int]]("failures/attempt-{:03d}-collectives-{:05d}.json")
    """A rank's collectives before a hang, from torch's flight recorder."""
    hung_gpus = _NumberedPath[[int, int]]("failures/attempt-{:03d}-gpus-{:03d}.json")
    telemetry = _NumberedPath[[int]]("telemetry/node-{:03d}.jsonl")
    logger_state = _NumberedPath[[str]]("loggers/{}.json")
    """A logger's progress, and the tracker's id of the run."""
    profile = _NumberedPath[[int]]("profiles/{:03d}")
    profile_trace = _NumberedPath[[int, int]]("profiles/{:03d}/rank-{:05d}.trace.json.gz")
    profile_result = _NumberedPath[[int, int]]("profiles/{:03d}/rank-{:05d}.json")
    """A rank's most expensive operators, or its error. Written last."""
    successor_claim = _NumberedPath[[str]]("chain/after-{}")
    """The id of the successor of a job. Only the first writer creates it."""
    successor_script = _NumberedPath[[str]]("chain/continues-job-{}")
    """The link to the batch script with which the successor of a job is submitted."""
    lease = _NumberedPath[[int]]("lease/{:06d}")
    """A lease. Under Slurm, only the supervisor with the highest number may train."""
    node_check_result = _NumberedPath[[int, int]]("checks/attempt-{:03d}/rank-{:05d}.json")
    memory_errors = _NumberedPath[[str, int]]("checks/memory-errors-{}-{:03d}.json")
    """The GPU memory errors on a host and local rank from before the job, recorded at its first check."""
    staging_result = _NumberedPath[[int, int]]("staging/attempt-{:03d}/node-{:05d}.json")
    """The result of staging on a node, which the supervisor removes."""
    staged_environment = _NumberedPath[[str]]("staging/environment-{}")
    """The path of the packed Python environment that all attempts of a job use."""
    unfinished_marker = _NumberedPath[[int, int, str]]("unfinished/attempt-{:03d}-rank-{:05d}-{}.json")
    """Exists while a rank is training; the key represents its output folder."""
    result = _NumberedPath[[int, int]]("results/attempt-{:03d}-rank-{:05d}.pkl")
    samples = _NumberedPath[[int, int]]("samples/attempt-{:03d}-rank-{:05d}.jsonl")

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
    def is_batch(self) -> bool:
        """True if the run is an adopted batch script, or a task of one."""
        return (self.array or self).batch_script.exists()

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

    def all_telemetry(self) -> list[Path]:
        return sorted((self.path / "telemetry").glob("node-*.jsonl"))

    def early_stop_reason(self) -> str | None:
        """Return the reason if the cancel request is from early stopping; None if it is from the user."""
        try:
            return read_regular(self.cancel_request).decode(errors="replace").strip() or None
        except OSError:
            return None

    def new_profile(self) -> int:
        """Reserve the number of a new profile by creating its folder."""
        return self._reserve(len(self.storage.names(self.path / "profiles")), self.profile)

    def request_requeue(self, attempt: int) -> None:
        """Announce a requeue: preemptions send the same signal, after which the ranks expect to be killed."""
        with suppress(OSError):
            write_atomic(self.requeue_request, f"{attempt}\n", durable=False)

    def is_asked_to_requeue(self, attempt: int) -> bool:
        """True if the user requested a requeue of this attempt, so the end of the job is not imminent."""
        try:
            return read_regular(self.requeue_request) == f"{attempt}\n".encode()
        except OSError:
            return False

    def grace_key(self, attempt: int) -> str | None:
        """Return the key of the grace time after the user's request to stop; None without a request."""
        if self.is_asked_to_requeue(attempt):
            return REQUEUE_GRACE_KEY
        is_cancelled = self.cancel_request.exists() and self.early_stop_reason() is None
        return CANCEL_GRACE_KEY if is_cancelled else None

    def leases(self) -> list[int]:
        return _numbered(self.path / "lease", _LEASE)

    def node_check_results(self, attempt: int) -> list[Path]:
        return sorted(self.node_check_result(attempt, 0).parent.glob("rank-*.json"))

    def ranks(self, attempt: int) -> list[int]:
        """Return the ranks with a log in this attempt, ascending."""
        return sorted({rank for rank, _ in self.rank_logs(attempt).values()})

    def rank_logs(self, attempt: int) -> dict[int, tuple[int, Path]]:
        """Return the rank and the path of each log of this attempt, by the number of an own log, or the rank.

        In a batch script, the log without a number is the output of the script.
        """
        folder = self.attempt_logs(attempt)
        found = filter(None, map(_RANK_LOG.fullmatch, self.storage.names(folder)))
        logs = {int(match[2] or match[1]): (int(match[1]), folder / match[0]) for match in found}
        return dict(sorted(logs.items()))

    def log_of(self, attempt: int, rank: int) -> Path:
        """Return the newest own log of a rank of a batch script, or else the log of the script."""
        logs = self.rank_logs(attempt).items()
        own = [number for number, (its_rank, _) in logs if number and its_rank == rank]
        return self.own_log(attempt, rank, max(own)) if own else self.rank_log(attempt, 0)

    def all_log_indexes(self, attempt: int) -> list[Path]:
        return sorted(self.attempt_logs(attempt).glob("times-*.jsonl"))

    def unfinished_files(self, attempt: int) -> list[Path]:
        """Return the existing files of all ranks, in rank order."""
        rank = "[0-9]" * 5
        return sorted((self.path / "unfinished").glob(f"attempt-{attempt:03d}-rank-{rank}-*.json"))

    def failure_files(self, attempt: int) -> list[Path]:
        """Return the files of the failed ranks in the attempt."""
        return sorted(self.failures.glob(f"attempt-{attempt:03d}-rank-*.json"))

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

    def attempt_variables(self, attempt: int) -> dict[str, str]:
        """Return the variables of the processes of an attempt."""
        return {RUN_DIR_VARIABLE: str(self.path), ATTEMPT_VARIABLE: str(attempt)}

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

    def read_events(self) -> Iterator[Event]:
        """Yield the recorded events. Damaged lines are skipped with a warning."""
        return self.storage.read_events(self.events)


def attempt_of(environ: Mapping[str, str]) -> tuple[RunDir, int]:
    """Return the run and the attempt of a process of a step; see `RunDir.attempt_variables`."""
    return RunDir(Path(environ[RUN_DIR_VARIABLE])), int(environ[ATTEMPT_VARIABLE])


def find_output(run_dir: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> RunDir | None:
    """Return the folder that the script chose, unless the run is verified in another, or the run folder."""
    is_chosen = run_dir and VERIFY_STEPS_VARIABLE not in environ
    folder = run_dir if is_chosen else environ.get(RUN_DIR_VARIABLE)
    return RunDir(Path(folder).absolute()) if folder else None


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
    """Return the steps with a score, best first, newer ones first if equal. None and NaN never count."""
    valid = {step: score for step, score in scores.items() if score is not None and not math.isnan(score)}
    sign = -1 if mode == "max" else 1
    return sorted(valid, key=lambda step: (sign * valid[step], -step))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    return _numbers(RunStorage().names(folder), pattern)


def _numbers(names: Iterable[str], pattern: re.Pattern[str]) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
