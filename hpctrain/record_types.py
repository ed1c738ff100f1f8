"""Define the records that hpctrain writes and sends, and decode and validate them.

Fields that a newer version has added are ignored. Files are written with `json.dumps`: a loss can be NaN or
infinite, which msgspec does not write. A submission imports this module only if it reads records, because the
import takes a tenth of the time of a submission.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from hpctrain.files import Record, read_lines, read_regular

Count = Annotated[int, Meta(ge=0, lt=2**53)]
#: A duration, or a time since the epoch; Python's calendar ends with the year 9999.
Seconds = Annotated[float, Meta(ge=0, lt=253_402_300_800)]
#: A number for each GPU of a node; None if unknown.
GpuNumbers = Annotated[list[int | float | None], Meta(max_length=64)]

#: Fields that hpctrain writes to a line of `metrics.jsonl`; metrics cannot have these names.
RESERVED_FIELDS = frozenset({"step", "epoch", "time", "attempt", "spent", "first_step", "last_step"})


class PartDuration(Struct, frozen=True):
    """Seconds of a part of the start: the median of the ranks, and the slowest rank with its host."""

    median: Seconds
    max: Seconds
    host: str | None = None


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `events.jsonl`. Each kind has some of the fields."""

    time: Seconds
    attempt: Count
    kind: str

    step: Count | None = None
    rank: Annotated[int, Meta(ge=-1, lt=2**53)] | None = None
    """The rank that failed first, or -1 for a failure before the ranks; None for a failed save."""
    host: str | None = None
    hosts: list[str] | None = None
    nodes: Count | None = None
    nodes_before: Count | None = None
    world_size: Count | None = None
    ranks: list[Count] | None = None

    cause: str | None = None
    reason: str | None = None
    note: str | None = None
    end_kind: str | None = field(name="class", default=None)
    log: str | None = None
    path: str | None = None
    tier: str | None = None
    checkpoint: str | None = None
    """The loaded checkpoint."""
    is_loaded: bool | None = None
    """True if the script has loaded a state of this step itself; otherwise, the step may be assumed."""
    broken: list[str] | None = None
    """Descriptions of the damaged checkpoints that were skipped."""
    num_bytes: Count | None = field(name="bytes", default=None)
    memory_bytes: Count | None = None
    sent_bytes: Count | None = None
    every_steps: Count | None = None
    seconds: Seconds | dict[str, Seconds] | None = None
    """Duration; for a straggler, by part of a step."""
    stall_s: Seconds | None = None
    saved: bool | None = None
    finite: bool | None = None
    score: float | None = None
    metric: str | None = None
    mode: str | None = None
    action: str | None = None
    signal: str | None = None

    job_id: str | None = None
    backend: str | None = None
    modules: list[str] | None = None
    args: list[str] | None = None
    """Arguments of the script, without secrets."""
    after: str | None = None
    """The predecessor of a successor job."""
    job_state: str | None = None
    state: str | None = None
    exit_code: Count | None = None
    by: str | None = None
    memory: str | None = None
    lost: list[str] | None = None
    starts_over: bool | None = None
    failed_ranks: Count | None = None
    micro_batch_size: Count | None = None
    verified_step: Count | None = None
    device: str | None = None
    fault: str | None = None

    ratio: Annotated[float, Meta(ge=0, lt=1e9)] | None = None
    part: str | None = None
    typical: dict[str, Seconds] | None = None
    lasting: bool = True
    parts: dict[str, PartDuration] | None = None
    slowest_nodes: dict[str, dict[str, Seconds]] | None = None
    reused: Count | None = None
    saved_s: Seconds | None = None
    digests: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name in _REQUIRED_FIELDS.get(self.kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"the event {self.kind!r} has no {name}")

    @property
    def duration_s(self) -> float | None:
        return self.seconds if isinstance(self.seconds, float) else None

    @property
    def is_new_submission(self) -> bool:
        """True for a submission by the user; a successor job continues the previous submission."""
        return self.kind == "submitted" and self.after is None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the line that have a value."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


_REQUIRED_FIELDS = {
    "submitted": ("job_id", "backend"),
    "seen": ("job_id", "job_state"),
    "handover": ("job_id",),
    "excluded": ("hosts",),
    "paused": ("rank", "seconds"),
    "staged": ("num_bytes", "seconds", "reused", "saved_s"),
    "startup": ("seconds", "parts", "slowest_nodes"),
    "finished": ("state",),
}


class StepRecord(Struct):
    """A line of `metrics.jsonl`."""

    step: Count
    time: Seconds = 0.0
    attempt: Count = 0
    epoch: int | float | None = None
    spent: dict[str, Seconds] = {}
    """Seconds before the end of the step by category; `all` is their sum."""
    first_step: Count | None = None
    """The first step of the attempt, if it is recorded."""
    last_step: Count | None = None
    """The last step of the training."""
    metrics: dict[str, Any] = field(name="*", default_factory=dict)
    """All other fields."""

    def line(self) -> dict[str, Any]:
        """Return the fields in the order of writing, without those that are not known."""
        names = ("step", "epoch", "time", "attempt", "first_step", "spent", "last_step")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**self.metrics, **fields}


class NodeSample(Struct, kw_only=True):
    """A line of `telemetry/node-NNN.jsonl`: the hardware of a node, or measurements since the last line."""

    time: Seconds
    host: str = ""
    seconds: Annotated[float, Meta(gt=0, lt=3600)] = 1.0

    cpus: Count | None = None
    memory_total: Count | None = None
    gpu_names: Annotated[list[str], Meta(max_length=64)] = []
    gpu_memory_total: GpuNumbers = []

    cpu: float | None = None
    memory: Count | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    net_rx: float | None = None
    net_tx: float | None = None
    gpu_util: GpuNumbers | None = None
    gpu_memory: GpuNumbers | None = None
    gpu_power_w: GpuNumbers | None = None
    gpu_temp_c: GpuNumbers | None = None
    gpu_clock_mhz: GpuNumbers | None = None
    gpu_sm: GpuNumbers | None = None
    gpu_tensor: GpuNumbers | None = None
    gpu_dram: GpuNumbers | None = None
    gpu_energy_j: GpuNumbers | None = None
    gpu_ecc_errors: GpuNumbers | None = None
    gpu_throttled: Annotated[list[list[str]], Meta(max_length=64)] = []
    gpu_xids: Annotated[list[list[int]], Meta(max_length=64)] = []


class Corruption(Struct, frozen=True):
    """Report of a rank that detected wrong results."""

    suspects: Annotated[list[tuple[Count, str]], Meta(min_length=1)]
    """Ranks that may be faulty, with the names of their devices."""
    verified_step: Count


class FailureRecord(Struct, frozen=True):
    """A file in `failures`."""

    rank: Count
    host: str
    kind: str
    """`exception`, `signal`, `exit` or `unfinished`."""
    error: str
    """Class of the exception, name of the signal, the exit code, or the unfinished training's location."""
    message: str
    log: str
    order: Count | None = None
    """Order among the failures of the attempt, assigned by the store."""
    time: Seconds = 0.0
    final: bool = False
    """True if the rank reports that the next attempt would fail in the same way."""
    classes: tuple[str, ...] = ()
    has_trained: bool = False
    out_of_memory: bool = False
    """True if the kernel killed the rank for exceeding the memory of the job."""
    micro_batch_size: Count | None = None
    """Size of micro-batches that may fit into GPU memory, as suggested by the rank that ran out of memory."""
    corruption: Corruption | None = None
    node: str | None = None
    """Slurm's name of the node, which may differ from the host name."""
    traceback: str = ""


class LeaseHolder(Struct, frozen=True):
    """A file in `lease`."""

    job_id: str
    start: Count = 0
    """Number of earlier starts of the job by Slurm."""
    host: str = ""
    pid: Count = 0
    beat: Count = 0
    """Number of renewals of the lease."""
    released: bool = False


class UnfinishedCall(Struct, frozen=True):
    """A file in `unfinished`: a training call that has not returned."""

    call: str = field(name="what", default="training")
    last_step: Count | None = None


class NodeCheck(Struct, frozen=True):
    """A file in `checks`: the problems that a rank found on its node."""

    trouble: list[str]
    stopped: bool = False


class LogLength(Struct, frozen=True):
    """A line of `logs/attempt-NNN/times-NNNNN.jsonl`: the length of a rank's log at a time."""

    time: Seconds
    rank: Count
    num_bytes: Count = field(name="bytes")


class TrainedSamples(Struct, frozen=True):
    """A line in `samples`."""

    step: Count
    indices: list[int]
    epoch: int | float = 0


class CodeRecord(Struct, frozen=True):
    """A file `code/submission-NNN.json`."""

    commit: str | None = None
    changed: bool = False
    new_files: list[str] = []
    source: str | None = None
    diff: str = ""
    """Content of the file `code/submission-NNN.diff`."""


class ScriptCheckpoint(Struct, frozen=True):
    """A file or folder that a script has saved in its own format, with the time of its last change."""

    path: str
    time: Seconds
    num_bytes: Count = field(name="bytes")


class LoggerState(Struct):
    """A file in `loggers`: the progress of a logger, from which that of the next attempt continues."""

    known: str | None = None
    """Name of the run in the tracker."""
    offset: Count = 0
    """Offset of the delivered lines in `metrics.jsonl`, in bytes."""
    attempt: Annotated[int, Meta(ge=-1)] = -1
    """The newest attempt with delivered lines."""
    steps: dict[str, Count] = {}
    """The last delivered step of each metric."""
    sending: dict[str, Count] | None = None
    """The value of `steps` after the delivery in progress."""


class RankPhase(StrEnum):
    """Activity of a rank."""

    START = "start"
    """Until a `Trainer` starts, or until the first call of `hpctrain.should_stop`."""
    JOIN = "join"
    """In `init_process_group` of a script, until all ranks have arrived."""
    SCRIPT = "script"
    """From the first optimizer step of a script without a `Trainer`."""
    LOAD = "load"
    FIRST = "first"
    """The first step, which may compile. Only the supervisor distinguishes it from `DATA` and `STEP`."""
    DATA = "data"
    STEP = "step"
    VALIDATE = "validate"
    SAVE = "save"
    END = "end"


class RankSnapshot(Struct, frozen=True):
    """Report of a rank on its position in a hung attempt."""

    phase: str
    step: int
    place: str
    """The innermost line of user code, as `training_step (train.py:12)`."""
    waits: bool
    rendezvous: str | None = None
    """Address at which the rank is waiting for the process group."""


class RankMessage(Struct, frozen=True):
    """A message of a rank to the supervisor: a heartbeat, or one of the fields after `startup`."""

    beats: int | None = None
    """Number of activities that ended; None in a message that is not a heartbeat."""
    phase: str = ""
    step: int = 0
    spent: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of waiting for data, computing, and exchanging gradients."""
    timed: tuple[int, int] = (0, 0)
    """Steps that these times contain, and measured steps."""
    modules: list[str] = []
    changed: list[str] = []
    """Environment variables that the script has changed."""
    stop: bool = False
    paused: tuple[float, float] | None = None
    """Seconds of suspension, by the system clock and the monotonic clock."""
    startup: dict[str, float] | None = None
    """Times at which the parts of the start ended."""

    stop_signal: str | None = None
    told: RankSnapshot | None = None
    written: bool = False
    """True if the diagnostics are written."""
    can_stop_after: int | UnsetType | None = UNSET
    """Earliest step after which the rank can stop; None for a rank without counted steps."""
    exits: bool = False
    """True if the process exits by itself."""
    ready: bool = False
    why: str | None = None
    """Failure of a standby worker."""


class TrialLine(Struct, frozen=True):
    """A line of `early_stopping.jsonl`; None for a value that is not finite."""

    step: Count
    best: float | None
    mean: float | None


class SweepRanking(Struct, frozen=True):
    """The part of `sweep.json` that ranks the trials."""

    metric: str | None = None
    mode: Literal["min", "max"] | None = None


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(data: bytes | str, kind: type[Record]) -> Record:
    """Decode and validate a JSON record.

    Raises:
        ValueError: the record is damaged.
    """
    fields: Any = None
    try:
        try:
            # mypy does not consider type variables hashable.
            record: Record = _decoder(kind).decode(data)  # type: ignore[arg-type]
        except msgspec.DecodeError:
            # Python also writes NaN, infinity, and halves of surrogate pairs. Damaged text may not be UTF-8.
            fields = json.loads(data if isinstance(data, str) else data.decode(errors="replace"))
            record = msgspec.convert(fields, kind)
        if isinstance(record, StepRecord):
            fields = _decoder(dict).decode(data) if fields is None else fields
            record.metrics = {name: fields[name] for name in fields if name not in RESERVED_FIELDS}
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return record


def to_record(fields: Mapping[str, Any], kind: type[Record]) -> Record:
    """Return the record that these fields form in a file."""
    return decode(json.dumps(fields), kind)


def read_record(path: Path, kind: type[Record]) -> Record:
    """Decode the record in a regular file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the record is damaged.
    """
    return decode(read_regular(path), kind)


def read_records(path: Path, kind: type[Record], *, follow_links: bool = True) -> Iterator[Record]:
    """Yield the records of a JSON-lines file. See `read_lines`."""
    return read_lines(path, functools.partial(decode, kind=kind), follow_links=follow_links)
