"""The site, the run and the faults of a seed."""

import random
from dataclasses import dataclass

from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.notify import NotifyConfig


@dataclass(frozen=True)
class Fault:
    """A fault, at a time in seconds or at a count of events."""

    kind: str
    at: float
    value: float = 0.0
    """Duration in seconds, or number of the rank or node."""

    @property
    def is_survivable(self) -> bool:
        """True if a run with this fault alone completes."""
        return self.kind in _SURVIVABLE or (self.kind == "disk-away" and self.value < _BRIEF_S)

    @classmethod
    def parse(cls, text: str) -> "Fault":
        kind, _, rest = text.partition("@")
        at, _, value = rest.partition(":")
        return cls(kind, float(at), float(value or 0))

    def __str__(self) -> str:
        return f"{self.kind}@{self.at:g}" + (f":{self.value:g}" if self.value else "")


@dataclass(frozen=True)
class ForeignProgram:
    """A program that loads no checkpoint of hpctrain, and fails in each attempt; the bits of a number."""

    number: int

    COUNT = 128

    @property
    def counts_steps(self) -> bool:
        """True if it counts its steps over all attempts."""
        return bool(self.number & 4)

    @property
    def writes_files(self) -> bool:
        return bool(self.number & 8)

    @property
    def loads_files(self) -> bool:
        """True if each attempt continues from the file of the previous one."""
        return self.writes_files and bool(self.number & 64)

    def way_to_fail(self, attempt: int) -> str:
        """Return the way in which an attempt fails, which may differ from attempt to attempt."""
        shift = attempt if self.number & 32 else 0
        return _WAYS_TO_FAIL[((self.number & 3) + (self.number & 16) // 4 + shift) % len(_WAYS_TO_FAIL)]


_WAYS_TO_FAIL = (*("exception", "kill", "hang", "early exit"), *("oom", "signal", "data worker", "exit code"))
#: Faults with a duration in seconds.
_SLURM_WINDOWS = (
    *("slurm-away", "slurm-silent", "slurm-slow", "slurm-lost-answers", "slurm-stale", "slurm-refuse"),
)
_DISK_WINDOWS = ("disk-full", "disk-slow", "disk-away", "disk-stale")
_RANKS = ("crash", "gpu-fault", "kill", "oom", "hang", "silence", "lost-report")
_OTHERS = (
    *("messages-late", "preempt", "kill-node", "kill-batch", "pause-supervisor", "cancel", "requeue"),
    *("start-by-hand", "steal-lease", "crash-again"),
)
FAULT_KINDS = (*_SLURM_WINDOWS, *_DISK_WINDOWS, *_RANKS, *_OTHERS, "kill-supervisor", "torn-write")


_FREQUENT = (
    *("kill-supervisor", "kill-supervisor", "preempt", "kill-batch"),
    *("start-by-hand", "start-by-hand", "kill-node"),
)
_DRAIN_PROBABILITY = 0.1
#: Probability of a program that loads nothing, and fails in each attempt.
_START_OVER_PROBABILITY = 0.1
#: Duration of an I/O error that a run survives.
_BRIEF_S = 45.0
_SURVIVABLE = frozenset(
    {
        *_SLURM_WINDOWS,
        *("disk-slow", "disk-stale", "drain-node", "gpu-fault", "kill", "oom", "hang", "silence"),
        *("lost-report", "messages-late", "pause-supervisor", "requeue", "start-by-hand"),
        *("kill-supervisor", "torn-write"),
    }
)


@dataclass(frozen=True)
class SimConfig:
    spec: JobSpec
    num_cluster_nodes: int
    requeues: bool
    """True if the site requeues jobs."""
    preempt_mode: str
    grace_s: float
    kill_wait_s: float
    has_free_nodes: bool
    array_task: int | None
    num_steps: int
    step_range_s: tuple[float, float]
    save_range_s: tuple[float, float]
    save_every: int
    keep_last: int
    agrees_through_supervisor: bool
    submit_delay_s: float
    """Seconds after the submission at which `submit` records the job."""
    yield_probability: float
    keeps_warnings: bool
    """True if a job that was warned of a preemption is requeued when a later start completes."""


def make_config(seed: int, run_dir: str) -> SimConfig:
    rng = random.Random(f"config-{seed}")
    nodes = rng.choice((1, 2, 2, 3))
    limit = rng.choice((None, None, 150.0, 400.0))
    array_task = rng.choice((None, None, None, 3))
    spec = JobSpec(
        script="/w/train.py",
        name="sim",
        run_id="run",
        run_dir=run_dir,
        backend="slurm",
        array_task=array_task,
        nodes=nodes,
        min_nodes=rng.choice((nodes, nodes, 1)),
        spare_nodes=rng.choice((0, 0, 1)),
        scale_up_after_s=rng.choice((0, 60)),
        ntasks_per_node=rng.choice((1, 2)),
        python="python",
        workdir="/w",
        time_limit_s=limit,
        stop_before_limit_s=30 if limit else 0,
        standby_workers_s=rng.choice((None, 10)),
        hang_timeout_s=rng.choice((30, 30, 60)),
        resume_mode=rng.choice(("auto", "auto", "requeue", "successor")),
        node_check=rng.choice(("auto", "never")),
        notify=NotifyConfig(targets=("true",), stall_s=60) if rng.random() < 0.1 else NotifyConfig(),
    )
    step_s = rng.uniform(2.0, 8.0)
    requeues = rng.random() < 0.7
    return SimConfig(
        spec=spec,
        num_cluster_nodes=spec.most_granted + rng.choice((0, 1, 2)),
        requeues=requeues,
        preempt_mode=rng.choice(("REQUEUE", "CANCEL")),
        grace_s=rng.choice((0.0, 30.0, 60.0)),
        kill_wait_s=rng.choice((5.0, 30.0)),
        has_free_nodes=rng.random() < 0.5,
        array_task=array_task,
        num_steps=rng.randint(6, 16),
        step_range_s=(step_s, step_s * rng.uniform(1.0, 2.0)),
        save_range_s=(0.5, rng.uniform(0.5, 8.0)),
        save_every=rng.randint(2, 5),
        keep_last=rng.choice((1, 2)),
        agrees_through_supervisor=rng.random() < 0.3,
        submit_delay_s=rng.choice((0.0, 0.1, 1.0)),
        yield_probability=rng.choice((0.0, 0.05, 0.3)),
        # Drawn separately, so that the other properties of a seed do not change.
        keeps_warnings=random.Random(f"warnings-{seed}").random() < 0.5,
    )


def make_faults(seed: int) -> list[Fault]:
    """Return the faults of a seed, at most seven; those of some seeds come together."""
    rng = random.Random(f"faults-{seed}")
    together = rng.choice((None, None, round(rng.uniform(0.0, 200.0))))
    faults = [_make_fault(rng, together) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6)))]
    # Drawn separately, so that the other faults of a seed do not change.
    if (drain := random.Random(f"drain-{seed}")).random() < _DRAIN_PROBABILITY:
        faults.append(Fault("drain-node", round(drain.uniform(0.0, 200.0), 1), drain.randint(0, 3)))
    if (program := random.Random(f"start-over-{seed}")).random() < _START_OVER_PROBABILITY:
        faults.append(Fault("start-over", 0.0, program.randrange(ForeignProgram.COUNT)))
    return faults


def _make_fault(rng: random.Random, together: float | None) -> Fault:
    kind = rng.choice((*FAULT_KINDS, *_FREQUENT))
    if kind == "kill-supervisor":
        return Fault(kind, rng.randint(1, rng.choice((60, 200, 500))))
    if kind == "torn-write":
        return Fault(kind, rng.randint(1, 30))
    if together is None:
        at = round(rng.uniform(0.0, rng.choice((10.0, 60.0, 200.0, 500.0))), 1)
    else:
        at = round(together + rng.uniform(0.0, 30.0), 1)
    if kind in _RANKS:
        return Fault(kind, at, rng.randint(0, 5))
    if kind == "kill-node":
        return Fault(kind, at, rng.randint(0, 3))
    return Fault(kind, at, round(rng.choice((5.0, 20.0, 90.0, 200.0)) * rng.uniform(0.5, 1.0), 1))
