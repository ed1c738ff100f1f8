"""A model of the jobs of a run: lease, claim, requeue and successor, with the product's own decisions.

A step ends with an access to a shared file or to Slurm. Each step of a supervisor may be followed by any step
of another, by its death, or by the end of its job. All decisions are those of the product's functions.

Jobs: 17 is submitted by the user. 18 and 19 are its successors; 19 exists if Slurm accepts 18 so late that
the supervisor submits again.

Assumptions, each as weak as the product's documentation allows:

- Slurm does not answer a query (the controller is away), or answers truly. It requeues a running job at any
  time, also after a node failure, but then has ended its processes. It starts a successor only when its
  predecessor has ended. The answer to a submission may be lost, or the job may appear later.
- Files are read as by NFS: their content is current when they are opened, but a listing of a folder may be as
  old as the last change by the same job. Links and appended lines are atomic. The disk may have no space
  for a lease if the listing is current, and the events fit.
- The age of a lease is wrong by at most `CLOCK_SKEW_S`. A holder that is not suspended renews in time.
- The watchdog restarts a killed supervisor once. A job starts at most `MAX_STARTS` times.
"""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain import record_types
from hpctrain.jobspec.restart_policy import EndKind, RestartPolicy
from hpctrain.records.lease import (
    EXPIRY_S,
    KEPT_LEASES,
    RENEW_INTERVAL_S,
    LeaseHolder,
    LeaseState,
    counts_as_alive,
    inherits_lease,
)
from hpctrain.records.run_record import RunRecord, summarize_events
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.supervisor.acquire_run import recorded_end, recorded_successor
from hpctrain.supervisor.policy.decide import Action, AttemptEnd, RunSituation, decide
from hpctrain.supervisor.policy.job_intent import (
    ContinuationMethod,
    JobDisposition,
    OwnershipDecision,
    OwnershipState,
    continuation_methods,
    decide_ownership,
    resolve_intent,
)

CLOCK_SKEW_S = 45.0
MAX_STARTS, MAX_DEATHS = 2, 1
FIRST = "17"
_POLICY = RestartPolicy.with_changes({}, max_failures=3)

#: Number of the newest leases that a listing may lack.
MAX_HIDDEN = 1

#: kind, job, and the predecessor or the final state.
Event = tuple[str, str, str | None]


class Step(NamedTuple):
    """A possible step."""

    what: str
    world: "World"
    loses_job: bool = False
    """True if a job ends for good although the run needs it, and no supervisor can prevent that."""


class Job(NamedTuple):
    """A job in Slurm, and its supervisor."""

    id: str
    slurm: str = "new"
    """new, late (accepted, but not yet in the queue), pending, running or ended."""
    start: int = 0
    deaths: int = 0
    pc: str = ""
    """The next step of the supervisor; empty without one."""
    newest: str | None = None
    newest_after: str | None = None
    ended: str | None = None
    handover: bool = False
    claimed_by: str | None = None
    lease: int | None = None
    seen: int = -1
    """Number of the newest lease in the last listing."""
    suspended: str = ""
    """"now" if the supervisor is suspended, "was" afterwards."""

    @property
    def predecessor(self) -> str | None:
        return None if self.id == FIRST else FIRST


class World(NamedTuple):
    """The jobs of a run, and its shared files."""

    jobs: tuple[Job, ...]
    events: tuple[Event, ...] = (("submitted", FIRST, None),)
    claim: str | None = None
    leases: tuple[tuple[str, int, bool], ...] = ()
    """Job, start and release of each lease."""
    site_requeues: bool = True
    had_suspension: bool = False
    """True if a supervisor was suspended: another may start before it finds that it lost its lease."""

    def put(self, job: Job, **changes: Any) -> "World":
        changed = job._replace(**changes)
        return self._replace(jobs=tuple(changed if each.id == job.id else each for each in self.jobs))

    def log(self, kind: str, job_id: str, more: str | None = None) -> "World":
        events = (*self.events, (kind, job_id, more))
        last = max(at for at, event in enumerate(events) if event[0] == "submitted")
        # Of the events before the last submission, the product reads only the submissions, and the end of the
        # run before a successor was recorded.
        kept = list(dict.fromkeys(event for event in events[:last] if event[0] == "submitted"))
        if events[last][2] is not None and recorded_end(event_records(events[:last])) is not None:
            kept.append(max(event for event in events[:last] if event[0] == "finished"))
        events = events[last:]
        # Before the last start, it reads only the newest end.
        start = max((at for at, event in enumerate(events) if event[0] == "started"), default=0)
        ends = [at for at, event in enumerate(events) if event[0] == "finished"]
        for at, event in enumerate(events):
            if (at in (0, start) or at > start or at in ends[-1:]) and kept[-1:] != [event]:
                kept.append(event)
        return self._replace(events=tuple(kept))

    def renumber_leases(self) -> "World":
        """Begin with the oldest lease that a job holds or may list; only differences of numbers matter."""
        numbers = [job.lease for job in self.jobs if job.lease is not None]
        numbers += [job.seen for job in self.jobs if job.pc == "link"]
        first = min([len(self.leases) - 1 - MAX_HIDDEN, *numbers])
        if first <= 0:
            return self
        jobs = [
            job._replace(
                lease=None if job.lease is None else job.lease - first,
                seen=job.seen - first if job.pc == "link" else -1,
            )
            for job in self.jobs
        ]
        return self._replace(jobs=tuple(jobs), leases=self.leases[first:])

    @property
    def ended(self) -> str | None:
        """The recorded end of the run."""
        end = recorded_end(event_records(self.events))
        return end and end.state

    @property
    def finished(self) -> bool:
        """True if the run is complete."""
        return self.ended == "COMPLETED"

    @property
    def failed(self) -> bool:
        return self.ended == "FAILED"

    def training(self) -> list[Job]:
        """Return the jobs that train. A job that lost its lease in a suspension exits at its next renewal."""
        last = len(self.leases) - 1
        return [job for job in self.jobs if job.pc == "train" and (not job.suspended or job.lease == last)]


@cache
def event_records(events: tuple[Event, ...]) -> list[record_types.Event]:
    names = {"submitted": "after", "finished": "state"}
    return [
        record_types.Event(
            **{"time": 0.0, "attempt": 0, "kind": kind, "job_id": job, "backend": "slurm"}
            | ({names[kind]: more} if more is not None else {})
        )
        for kind, job, more in events
    ]


@cache
def record_of(events: tuple[Event, ...]) -> RunRecord:
    return summarize_events(RunDir(Path("/run")), reversed(event_records(events)))


def first_worlds(ids: tuple[str, ...]) -> list[World]:
    jobs = tuple(Job(each, "pending" if each == FIRST else "new") for each in ids)
    return [World(jobs, site_requeues=each) for each in (True, False)]


def next_steps(world: World) -> Iterator[Step]:
    """Yield the possible steps of Slurm, the user and the supervisors."""
    for job in world.jobs:
        for step in (*_slurm_steps(world, job), *_supervisor_steps(world, job)):
            yield step._replace(what=f"{job.id}: {step.what}", world=step.world.renumber_leases())


def _slurm_steps(world: World, job: Job) -> Iterator[Step]:
    if job.slurm == "late":
        yield Step("appears in the queue", world.put(job, slurm="pending"))
    before = next((each for each in world.jobs if each.id == job.predecessor), None)
    if job.slurm == "pending" and (before is None or before.slurm == "ended"):
        yield Step("starts", world.put(job, slurm="running", pc="read"))
    if job.slurm == "running":
        yield Step("its node fails", world.put(Job(job.id, "ended")), loses_job=True)
        if job.start + 1 < MAX_STARTS and world.site_requeues:
            yield Step("is requeued", world.put(Job(job.id, "pending", job.start + 1)))
        if job.deaths < MAX_DEATHS:
            yield Step("its supervisor is killed", world.put(Job(*job[:3], job.deaths + 1, "read")))


def _supervisor_steps(world: World, job: Job) -> Iterator[Step]:
    if job.suspended == "now":
        yield Step("resumes", world.put(job, suspended="was"))
        return
    if job.suspended and job.lease != len(world.leases) - 1:
        # A known limit: the job that took the lease may not train, and both exit with an error.
        yield Step("finds a newer lease", _exit(world, job, released=False), loses_job=True)
    if job.pc:
        yield from _STEPS[job.pc](world, job)


def _read(world: World, job: Job) -> Iterator[Step]:
    record = record_of(world.events)
    facts = {"newest": record.job_id, "ended": world.ended, "handover": record.handover is not None}
    facts["newest_after"] = record.submitted and record.submitted.after
    yield Step("reads the record", world.put(job, pc="claim" if job.predecessor else "find", **facts))


def _claim(world: World, job: Job) -> Iterator[Step]:
    claim = world.claim or job.id
    yield Step("claims the run", world._replace(claim=claim).put(job, pc="find", claimed_by=claim))


def _find(world: World, job: Job) -> Iterator[Step]:
    """Search for a successor of this job, and decide."""
    found = recorded_successor(event_records(world.events), job.id)
    queued = _queued(world, job)
    if found is None and job.newest == job.id and job.handover and queued is not None:
        yield Step(
            "finds its successor in the queue", _decide(world.log("submitted", queued, job.id), job, queued)
        )
    yield Step(
        "finds no answer in the queue" if found is None else "finds a successor", _decide(world, job, found)
    )


def _decide(world: World, job: Job, successor: str | None) -> World:
    decision = decide_ownership(
        OwnershipState(
            job.id,
            newest=job.newest,
            newest_after=job.newest_after,
            ended=job.ended,
            predecessor=job.predecessor,
            claimed_by=job.claimed_by,
            successor=successor,
        )
    )
    if decision is OwnershipDecision.BEGIN:
        # Forget what is not read again.
        newest = job.id if job.newest == job.id else None
        return world.put(Job(*job[:4], "list", newest))
    return _exit(world, job)


def _list(world: World, job: Job) -> Iterator[Step]:
    """List the leases, read the newest of them, and ask Slurm for its holder."""
    own = max((at for at, lease in enumerate(world.leases) if lease[0] == job.id), default=-1)
    for newest in range(max(own, len(world.leases) - 1 - MAX_HIDDEN), len(world.leases)):
        if newest < 0:
            yield from _replace_lease(world, job, newest, "lists no lease")
            continue
        if newest < len(world.leases) - KEPT_LEASES:
            yield Step(f"cannot read lease {newest}", world.put(job, pc="register", lease=None))
            continue
        it = LeaseHolder(*world.leases[newest][:2], released=world.leases[newest][2])
        if inherits_lease(LeaseHolder(job.id, job.start), it, job.predecessor, job.deaths):
            yield from _replace_lease(world, job, newest, f"inherits lease {newest}")
            continue
        for state, age_s in _views(world, newest):
            if counts_as_alive(LeaseState(newest, it, age_s), state):
                # An error for the user, who submitted the job, or must submit it again without an answer.
                loses = state is RunState.UNKNOWN
                yield Step(f"finds lease {newest} held ({state})", _exit(world, job), loses_job=loses)
            else:
                what = f"finds lease {newest} free ({state}, {age_s} s)"
                is_expired = counts_as_alive(LeaseState(newest, it, age_s), state, math.inf)
                yield from _replace_lease(world, job, newest, what, is_expired=is_expired)


def _replace_lease(
    world: World, job: Job, newest: int, what: str, *, is_expired: bool = False
) -> Iterator[Step]:
    yield Step(what, world.put(job, pc="link", seen=newest))
    if newest == len(world.leases) - 1:
        after = _exit(world, job) if is_expired else world.put(job, pc="register", lease=None)
        yield Step(f"{what}, cannot write another", after, loses_job=is_expired)


def _views(world: World, number: int) -> Iterator[tuple[RunState, float]]:
    """Yield Slurm's possible answers for the holder of a lease, with the possible ages of the lease."""
    (job,) = (each for each in world.jobs if each.id == world.leases[number][0])
    truth = {"running": RunState.RUNNING, "ended": RunState.FAILED}.get(job.slurm, RunState.PENDING)
    yield truth, 0.0
    yield RunState.UNKNOWN, RENEW_INTERVAL_S + CLOCK_SKEW_S
    if job.lease != number or job.suspended == "now":
        yield RunState.UNKNOWN, EXPIRY_S


def _link(world: World, job: Job) -> Iterator[Step]:
    number = job.seen + 1
    if len(world.leases) - KEPT_LEASES <= number < len(world.leases):
        yield Step(f"finds that lease {number} exists", world.put(job, pc="list", seen=-1))
    elif number < len(world.leases):
        # The name is free again: the lease was deleted.
        leases = list(world.leases)
        leases[number] = job.id, job.start, False
        yield Step(
            f"creates lease {number} again",
            world._replace(leases=tuple(leases)).put(job, pc="register", lease=number),
        )
    else:
        # No listing is so old that it ends with an earlier lease.
        forgotten = [("", 0, True)] * (len(world.leases) - MAX_HIDDEN)
        leases = (*forgotten, *world.leases[len(forgotten) :], (job.id, job.start, False))
        yield Step(
            f"creates lease {number}",
            world._replace(leases=leases).put(job, pc="register", lease=number, seen=-1),
        )


def _register(world: World, job: Job) -> Iterator[Step]:
    """Record this job as the newest of the run."""
    if job.predecessor is not None and recorded_end(event_records(world.events)) is not None:
        yield Step("finds the end of the run", _exit(world, job))
        return
    if job.predecessor is not None:
        after = world if job.newest == job.id else world.log("submitted", job.id, job.predecessor)
        yield Step("registers", _train(after, job))
        return
    submitted = [event.job_id for event in event_records(world.events) if event.kind == "submitted"]
    if submitted[-1:] != [job.id]:
        yield Step("finds another job", _exit(world, job), loses_job=True)
    elif recorded_end(event_records(world.events)) is not None:
        yield Step("finds the end of the run", _exit(world, job))
    else:
        yield Step("is registered", _train(world, job))


def _train(world: World, job: Job) -> World:
    trainer = Job(*job[:4], "train", lease=job.lease)
    return world.put(trainer).log("started", job.id)


def _end_attempt(world: World, job: Job) -> Iterator[Step]:
    """Complete, or end early for any reason that Slurm may have."""
    if job.lease is not None and not job.suspended:
        yield Step("is suspended", world._replace(had_suspension=True).put(job, suspended="now"))
    for what, pc in _ends(site_requeues=world.site_requeues):
        if pc == "hand over" and job.id != FIRST:
            continue  # the same as the first, with other numbers
        after = world.put(job, pc=pc) if pc else _exit(world, job)
        yield Step(what, after, loses_job=pc in ("", "fail"))


@cache
def _ends(*, site_requeues: bool) -> list[tuple[str, str]]:
    """Return the possible ends of an attempt, each with the next step; empty for an exit."""
    ends = []
    for disposition in JobDisposition:
        intent = resolve_intent(cancelled=False, disposition=disposition, resume_mode="auto")
        for kind in (EndKind.DONE, EndKind.PREEMPTED, EndKind.USER_ERROR):
            decision = decide(RunSituation(_POLICY, intent=intent), AttemptEnd(kind), 0.0)
            methods = continuation_methods("auto", intent, can_requeue=site_requeues)
            match decision.action:
                case Action.COMPLETE:
                    ends.append((str(kind), "finish"))
                case Action.FAIL:
                    ends.append((str(kind), "fail"))
                case Action.LEAVE if disposition is not JobDisposition.REQUEUED:  # a step of Slurm
                    ends.append(("Slurm ends it", ""))
                case Action.REQUEUE if ContinuationMethod.SUCCESSOR in methods:
                    # A successful requeue is also a step of Slurm.
                    ends.append((f"{kind}, {disposition.value}", "hand over"))
    return ends


def _finish(world: World, job: Job) -> Iterator[Step]:
    yield Step("records the end", world.log("finished", job.id, "COMPLETED").put(job, pc="leave"))


def _fail(world: World, job: Job) -> Iterator[Step]:
    yield Step("records the failure", world.log("finished", job.id, "FAILED").put(job, pc="leave"))


def _leave(world: World, job: Job) -> Iterator[Step]:
    yield Step("exits", _exit(world, job))


def _hand_over(world: World, job: Job) -> Iterator[Step]:
    yield Step("records its intent", world.log("handover", job.id).put(job, pc="submit"))


def _submit(world: World, job: Job) -> Iterator[Step]:
    """Search the queue, then submit."""
    if (queued := _queued(world, job)) is not None:
        yield Step("finds its successor", _exit(world.log("submitted", queued, job.id), job))
        return
    for new in world.jobs:
        if new.predecessor == job.id and new.slurm == "new":
            queue = world.put(new, slurm="pending")
            yield Step(f"submits {new.id}", queue.put(job, pc="record", claimed_by=new.id))
            yield Step(f"submits {new.id}, without an answer", queue)
            yield Step(f"submits {new.id}, late", world.put(new, slurm="late"))
            break
    yield Step("cannot submit", world.put(job, pc="fail"), loses_job=True)


def _record(world: World, job: Job) -> Iterator[Step]:
    assert job.claimed_by is not None
    yield Step("records its successor", _exit(world.log("submitted", job.claimed_by, job.id), job))


def _queued(world: World, job: Job) -> str | None:
    known = ("pending", "running", "ended")
    return next((each.id for each in world.jobs if each.predecessor == job.id and each.slurm in known), None)


def _exit(world: World, job: Job, *, released: bool = True) -> World:
    """End the job, with its supervisor; it releases its lease."""
    if released and job.lease is not None:
        leases = list(world.leases)
        leases[job.lease] = leases[job.lease][0], 0, True
        world = world._replace(leases=tuple(leases))
    return world.put(Job(job.id, "ended"))


_STEPS = {
    "read": _read,
    "claim": _claim,
    "find": _find,
    "list": _list,
    "link": _link,
    "register": _register,
    "train": _end_attempt,
    "finish": _finish,
    "fail": _fail,
    "leave": _leave,
    "hand over": _hand_over,
    "submit": _submit,
    "record": _record,
}
