"""Every path of a run, named once, and the run's record of events."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.files import append_json_line, read_json_lines, write_atomic

EventKind = Literal[
    "submitted",
    "started",
    "resumed",
    "checkpoint",
    "signal",
    "failure",
    "restart",
    "shrink",
    "replace",
    "grow",
    "excluded",
    "straggler",
    "requeue",
    "handover",
    "chaos",
    "seen",
    "finished",
]

#: Variables that tell a rank where its run lives and which start this is.
RUN_DIR_VARIABLE = "HPCTRAIN_RUN_DIR"
ATTEMPT_VARIABLE = "HPCTRAIN_ATTEMPT"
#: Seconds that each stop signal leaves to the ranks: `SIGTERM=30,SIGUSR2=120`.
STOP_GRACE_VARIABLE = "HPCTRAIN_STOP_GRACE"
#: What stands there for the signal, whichever it is, of a requeue that the user asked for.
GRACE_OF_REQUEUE = "requeue"
#: Mean time between two interruptions of a node, in seconds, as far as the site knows.
NODE_MTBF_VARIABLE = "HPCTRAIN_NODE_MTBF_S"
#: The number of the task of a job array that a rank belongs to.
ARRAY_TASK_VARIABLE = "HPCTRAIN_ARRAY_TASK_ID"
#: The copy of the code that a rank runs, and the working tree that was copied.
CODE_VARIABLE = "HPCTRAIN_CODE_DIR"
CODE_SOURCE_VARIABLE = "HPCTRAIN_CODE_SOURCE"
#: A pipe whose other end the local supervisor holds: it closes when the supervisor dies, by whatever cause.
LIFELINE_VARIABLE = "HPCTRAIN_LIFELINE_FD"
#: Where the supervisor listens to its ranks: ADDRESS:PORT:TOKEN.
LINE_VARIABLE = "HPCTRAIN_LINE"
#: Tells a worker to import these modules, in JSON, and then to wait for the word to begin.
WAIT_VARIABLE = "HPCTRAIN_WAIT"
#: Set to 0, nodes are not measured.
TELEMETRY_VARIABLE = "HPCTRAIN_TELEMETRY"
#: The job that this one continues, where the site does not requeue.
PREDECESSOR_VARIABLE = "HPCTRAIN_PREDECESSOR"

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_ATTEMPT_FOLDER = re.compile(r"attempt-(\d{3,})")
_RANK_LOG = re.compile(r"rank-(\d{5,})\.log")
_CODE_FOLDER = re.compile(r"submission-(\d{3,})")
_TASK_FOLDER = re.compile(r"task-(\d+)")
_LEASE = re.compile(r"(\d{6,})")


@dataclass(frozen=True)
class RunDir:
    """The folder of one run. Holds paths only; nothing is created by looking at it."""

    path: Path

    @property
    def array(self) -> RunDir | None:
        """The folder of the job array that this is a task of; None where this is no task's."""
        return RunDir(self.path.parent) if _TASK_FOLDER.fullmatch(self.path.name) else None

    @property
    def run_id(self) -> str:
        """The folder's name; that of a task of a job array stands behind the array's."""
        return f"{self.path.parent.name}/{self.path.name}" if self.array else self.path.name

    @property
    def spec(self) -> Path:
        """What was asked for: the job's specification."""
        return self.path / "spec.yaml"

    @property
    def job_script(self) -> Path:
        """The script as it was handed to the scheduler."""
        return self.path / "job.sbatch"

    @property
    def git_ignore(self) -> Path:
        """Keeps the run out of the repository in which it lies, and out of copies of it."""
        return self.path / ".gitignore"

    @property
    def code(self) -> Path:
        """Copies of the code, and what each is a copy of."""
        return self.path / "code"

    def new_code(self) -> Path:
        """The place for the copy of the code of a new submission."""
        return self.code / f"submission-{max(_numbered(self.code, _CODE_FOLDER), default=-1) + 1:03d}"

    @property
    def report(self) -> Path:
        """The run in one page."""
        return self.path / "report.html"

    def telemetry(self, node: int) -> Path:
        """What a node measured of itself and of its GPUs."""
        return self.path / "telemetry" / f"node-{node:03d}.jsonl"

    def all_telemetry(self) -> list[Path]:
        """Those files of all nodes that have begun one."""
        return sorted((self.path / "telemetry").glob("node-*.jsonl"))

    @property
    def function(self) -> Path:
        """The function that every rank calls, where the run is not one of a script. Written once."""
        return self.path / "function.pkl"

    @property
    def continuation(self) -> Path:
        """What the function's `checkpoint` method wants to be called in its place when the run goes on."""
        return self.path / "continuation.pkl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def environment(self) -> Path:
        """What each start of the ranks ran on, and the settings of its training."""
        return self.path / "environment.jsonl"

    def logger_memory(self, name: str) -> Path:
        """What a logger has got so far, and what its tracker calls the run."""
        return self.path / "loggers" / f"{name}.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor did, and why."""
        return self.logs / "supervisor.log"

    @property
    def slurm_log(self) -> Path:
        """What the batch script and Slurm itself print."""
        return self.logs / "slurm.log"

    @property
    def lock(self) -> Path:
        """Held by submission and, on the local backend, by the run's supervisor as long as it lives."""
        return self.path / "supervisor.lock"

    @property
    def pace(self) -> Path:
        """How long the run took at most for what: by it a hang is known."""
        return self.path / "pace.json"

    @property
    def cancel_request(self) -> Path:
        """Exists once the user asked to cancel: a saved stop is then the end, not a requeue."""
        return self.path / "cancel-requested"

    @property
    def requeue_request(self) -> Path:
        """Holds the number of the attempt that the user asked to save, for another to go on."""
        return self.path / "requeue-requested"

    def is_asked_to_requeue(self, attempt: int) -> bool:
        """Whether it was the user who had this attempt told to stop: then nobody is about to end it."""
        try:
            return self.requeue_request.read_text() == f"{attempt}\n"
        except OSError:
            return False

    def succession(self, job_id: str) -> Path:
        """Holds the id of the job that has taken over after that job. Made once, by whoever comes first."""
        return self.path / "chain" / f"after-{job_id}"

    def lease(self, number: int) -> Path:
        """Says which supervisor may train here, under Slurm; the one with the highest number counts."""
        return self.path / "lease" / f"{number:06d}"

    def leases(self) -> list[int]:
        """Numbers of the leases that are kept, ascending."""
        return _numbered(self.path / "lease", _LEASE)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        return self.path / "failures"

    def check(self, attempt: int, rank: int) -> Path:
        """What a rank has seen when it looked at its node before the attempt."""
        return self.path / "checks" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.json"

    def checks(self, attempt: int) -> list[Path]:
        """Those files of all ranks that have written one."""
        return sorted(self.check(attempt, 0).parent.glob("rank-*.json"))

    def memory_errors(self, host: str, local_rank: int) -> Path:
        """The memory errors that a job found at its first look at the GPUs of a process: not its own."""
        return self.path / "checks" / f"memory-errors-{host}-{local_rank:03d}.json"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.log"

    def agent_log(self, attempt: int, node: int) -> Path:
        """What a node's agent of torchrun prints, where such agents start the ranks."""
        return self.attempt_logs(attempt) / f"agent-{node:05d}.log"

    def ranks(self, attempt: int) -> list[int]:
        """Ranks that have begun a log in this attempt, ascending."""
        return _numbered(self.attempt_logs(attempt), _RANK_LOG)

    def log_times(self, attempt: int, node: int) -> Path:
        """When the logs of a node's ranks had which length."""
        return self.attempt_logs(attempt) / f"times-{node:05d}.jsonl"

    def all_log_times(self, attempt: int) -> list[Path]:
        """Those files of all nodes that have begun one."""
        return sorted(self.attempt_logs(attempt).glob("times-*.jsonl"))

    def failure(self, attempt: int, rank: int) -> Path:
        return self.failures / f"attempt-{attempt:03d}-rank-{rank:05d}.json"

    def stacks(self, attempt: int, rank: int) -> Path:
        """Where the threads of a rank were when the run hung."""
        return self.failures / f"attempt-{attempt:03d}-stacks-{rank:05d}.txt"

    def collectives(self, attempt: int, rank: int) -> Path:
        """What the rank had exchanged with others until the run hung, as torch's flight recorder has it."""
        return self.failures / f"attempt-{attempt:03d}-collectives-{rank:05d}.json"

    def hung_gpus(self, attempt: int, node: int) -> Path:
        """How the GPUs of a node were when the run hung."""
        return self.failures / f"attempt-{attempt:03d}-gpus-{node:03d}.json"

    def raised(self, attempt: int, rank: int) -> Path:
        """The exception behind a failure, pickled, where that is possible."""
        return self.failure(attempt, rank).with_suffix(".pkl")

    def result(self, attempt: int, rank: int) -> Path:
        """What the function returned in this rank."""
        return self.path / "results" / f"attempt-{attempt:03d}-rank-{rank:05d}.pkl"

    def failure_files(self, attempt: int) -> list[Path]:
        """What the ranks that failed in the attempt have left so far."""
        return sorted(self.failures.glob(f"attempt-{attempt:03d}-rank-*.json"))

    def samples(self, attempt: int, rank: int) -> Path:
        return self.path / "samples" / f"attempt-{attempt:03d}-rank-{rank:05d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def task(self, index: int | str) -> RunDir:
        """The folder of one task of a job array: a whole run folder inside that of the array.

        Args:
            index: the task's number, or a symbol that stands for it.
        """
        return RunDir(self.path / f"task-{index}")

    def tasks(self) -> list[int]:
        """Numbers of the tasks of a job array, ascending; none where this is a single run."""
        return _numbered(self.path, _TASK_FOLDER)

    def attempts(self) -> list[int]:
        """Numbers of all starts of the workers so far, ascending."""
        return _numbered(self.logs, _ATTEMPT_FOLDER)

    def new_attempt(self) -> int:
        """Claim the number of a new start of the workers, by making the folder of its logs.

        Raises:
            OSError: the folder cannot be made.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        attempt = max(self.attempts(), default=-1) + 1
        while True:
            try:
                self.attempt_logs(attempt).mkdir()
            except FileExistsError:
                attempt += 1
            else:
                return attempt

    def log_event(self, kind: EventKind, attempt: int, **fields: Any) -> None:
        """Append an event to the run's record, with the time in seconds since the epoch."""
        append_json_line(self.events, event_record(kind, attempt, **fields))

    def write(self, path: Path, content: str) -> None:
        """Write a file of the run, and make the folder that it lies in.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, content)

    def read_events(self) -> Iterator[dict[str, Any]]:
        return read_json_lines(self.events)


def event_record(kind: EventKind, attempt: int, **fields: Any) -> dict[str, Any]:
    """An event that happens now, as the run's record has it."""
    return {"time": time.time(), "attempt": attempt, "kind": kind, **fields}


def step_name(step: int) -> str:
    """The name of the folder that holds the state after `step` optimizer steps."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps whose folders lie in `folder`, ascending; whether they are whole is not looked at."""
    return _numbered(folder, _STEP_FOLDER)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
