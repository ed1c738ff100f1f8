"""A Slurm in virtual time: jobs, nodes, and the commands that the supervisor runs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.rundir import PREDECESSOR_VARIABLE
from simulation.scheduler import EPOCH, Scheduler, SimProcess, SimThread

if TYPE_CHECKING:
    from simulation.rank_step import RankStep
    from simulation.world import World

#: Seconds for which Slurm holds a requeued job.
_HOLD_S = 121.0
_MIN_JOB_AGE_S = 300.0
_SLURMD_TIMEOUT_S = 60.0
_INVALID = "slurm_load_jobs error: Invalid job id specified"
_AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
_TIMED_OUT = "slurm_load_jobs error: Socket timed out on send/recv operation"
#: Parts of the supervisor's messages if a command fails without an answer.
NO_ANSWER = (_AWAY, _TIMED_OUT, "did not respond")
_REFUSED = "Requested operation is presently disabled"
_MAX_DEATHS = 3
_AT_ONCE = 15.0
_COMMANDS = ("srun", "squeue", "scontrol", "sbatch", "scancel", "sinfo")


@dataclass
class Job:
    """A job, or a task of an array."""

    raw: int
    name: str
    argv: str = ""
    predecessor: str | None = None
    after: str | None = None
    state: str = "PENDING"
    submitted: float = 0.0
    eligible: float = 0.0
    """When the job may start."""
    restarts: int = 0
    excluded: frozenset[str] = frozenset()
    nodes: list[str] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    final: str = ""
    is_requeued: bool = False
    """True if the ending job will be pending again."""
    reason: str = ""
    """Printed by slurmstepd when it ends the job."""
    steps: list[RankStep] = field(default_factory=list)
    batch: Batch | None = None
    num_starts: int = 0
    explicit_start: float | None = None
    was_requeued_by_slurm: bool = False
    was_warned: bool = False
    can_be_requeued: bool = True
    is_by_hand: bool = False
    """True if the user submitted the script."""

    @property
    def is_active(self) -> bool:
        return self.state in ("PENDING", "RUNNING", "COMPLETING")


class Batch:
    """The batch script of a job: the watchdog, which restarts a killed supervisor."""

    def __init__(self, world: World, job: Job, environ: Mapping[str, str]) -> None:
        self._world, self._job, self._environ = world, job, environ
        self.is_alive = True
        self._signalled = False
        self.supervisor: SimProcess
        self._launch(0)

    def _launch(self, deaths: int) -> None:
        world, job = self._world, self._job
        name = f"supervisor-{job.name}.{job.num_starts}.{deaths}"
        self.supervisor = SimProcess(world.scheduler, job.nodes[0], name)
        world.scheduler.trace("start", name)
        self.supervisor.on_exit = lambda code: self._on_exit(code, deaths)
        self.supervisor.start(lambda: world.run_supervisor(job, self._environ, deaths))

    def _on_exit(self, code: int, deaths: int) -> None:
        self._world.on_supervisor_exit(self._job, code)
        if code < 0 and self.is_alive and not self._signalled and deaths < _MAX_DEATHS:
            self._launch(deaths + 1)
        elif self.is_alive:
            self.is_alive = False
            self._world.slurm.on_batch_exit(self._job, code if code >= 0 else 128 - code)

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.is_alive = False
            self.supervisor.end(-number)
        else:
            self._signalled = True
            self.supervisor.signal(number)

    def kill_script(self) -> None:
        """Kill only the batch script; the supervisor receives SIGHUP from the kernel."""
        if self.is_alive:
            self.is_alive = False
            if not self.supervisor.killed:
                self.supervisor.signal(signal.SIGHUP)
            self._world.slurm.on_batch_exit(self._job, 137)


class SimSlurm:
    def __init__(self, world: World) -> None:
        self.world, self.scheduler = world, world.scheduler
        config = world.config
        self.site = config
        self.down: set[str] = set()
        self.unresponsive: set[str] = set()
        """Dead nodes that Slurm has not yet marked down."""
        self.draining: set[str] = set()
        """Nodes that accept no further job."""
        self.outages: list[tuple[float, float]] = []
        """Begin and duration of the outage of each node."""
        # With a large value, the second job starts at once.
        by_hand = any(fault.kind == "start-by-hand" and fault.value > _AT_ONCE for fault in world.faults)
        num_nodes = config.num_cluster_nodes + by_hand * config.spec.most_granted
        self.all_nodes = [f"n{i}" for i in range(1, num_nodes + 1)]
        self.jobs: list[Job] = []
        self.windows: list[tuple[str, float, float]] = []
        self._next_id = 17
        self._next_try = 0.0

    def has(self, fault: str) -> bool:
        now = self.scheduler.now
        return any(kind == fault and begin <= now < end for kind, begin, end in self.windows)

    # -- jobs

    def submit(self, argv: str = "", **fields: Any) -> Job:
        raw, self._next_id = self._next_id, self._next_id + 1
        task = self.site.array_task
        job = Job(raw, f"{raw}_{task}" if task is not None else str(raw), argv, **fields)
        job.submitted = job.eligible = self.scheduler.now
        self.jobs.append(job)
        self.scheduler.trace("submit", job.name, job.argv)
        self._schedule_soon()
        return job

    def find(self, job_id: str) -> Job | None:
        for job in self.jobs:
            if job_id in (job.name, str(job.raw)):
                old = not job.is_active and self.scheduler.now - job.ended > _MIN_JOB_AGE_S
                return None if old else job
        return None

    def _schedule_soon(self) -> None:
        self.scheduler.call_later(self.scheduler.random.uniform(0.5, 4.0), self._schedule)

    def _schedule(self) -> None:
        now = self.scheduler.now
        if self.has("away"):
            if now >= self._next_try:
                self._next_try = now + 10.0
                self.scheduler.call_at(self._next_try, self._schedule)
            return
        for job in self.jobs:
            if job.state != "PENDING":
                continue
            if job.eligible > now:
                self.scheduler.call_at(job.eligible, self._schedule_soon)
                continue
            if job.after and (other := self._job_named(job.after)) and other.is_active:
                continue
            busy = {
                node
                for other in self.jobs
                if other.state in ("RUNNING", "COMPLETING")
                for node in other.nodes
            }
            gone = self.down | self.unresponsive | self.draining | busy | job.excluded
            free = [node for node in self.all_nodes if node not in gone]
            if len(free) >= self.site.spec.least_granted:
                self._start(job, free[: self.site.spec.most_granted])

    def _job_named(self, name: str) -> Job | None:
        return next((job for job in self.jobs if job.name == name), None)

    def _start(self, job: Job, nodes: list[str]) -> None:
        job.state, job.nodes, job.started = "RUNNING", list(nodes), self.scheduler.now
        job.steps, job.final, job.is_requeued, job.reason = [], "", False, ""
        job.num_starts += 1
        self.scheduler.trace("job starts", job.name, *nodes)
        environ = {
            "SLURM_JOB_ID": str(job.raw),
            "SLURM_JOB_NODELIST": compress_hostlist(nodes),
            "SLURM_JOB_PARTITION": "main",
            "SLURMD_NODENAME": nodes[0],
            "SLURM_MEM_PER_NODE": "4000",
        }
        if job.restarts:
            environ["SLURM_RESTART_COUNT"] = str(job.restarts)
        if self.site.array_task is not None:
            environ |= {"SLURM_ARRAY_JOB_ID": str(job.raw), "SLURM_ARRAY_TASK_ID": str(self.site.array_task)}
        if job.predecessor is not None:
            environ[PREDECESSOR_VARIABLE] = job.predecessor
        job.batch = Batch(self.world, job, environ)
        start = job.num_starts
        if (limit := self.site.spec.time_limit_s) is not None:
            lead = self.site.spec.stop_before_limit_s
            self._while_running(job, start, limit - lead, lambda: self.signal_steps(job, signal.SIGUSR2))
            self._while_running(job, start, limit, lambda: self.end_job(job, "TIMEOUT"))

    def _while_running(self, job: Job, start: int, seconds: float, action: Callable[[], object]) -> None:
        def act() -> None:
            if job.state == "RUNNING" and job.num_starts == start:
                action()

        self.scheduler.call_later(seconds, act)

    def signal_steps(self, job: Job, number: int) -> None:
        for step in job.steps:
            step.signal(number)

    def preempt(self, job: Job) -> None:
        """Preempt a job: SIGTERM to the steps, and after the grace time the end of the job."""
        if job.state != "RUNNING":
            return
        self.scheduler.trace("preempt", job.name)
        if self.site.grace_s:
            self.signal_steps(job, signal.SIGTERM)
            job.was_warned = True
        requeues = self.site.preempt_mode == "REQUEUE" and self._requeues(job)
        end = lambda: self.end_job(job, "PREEMPTED", requeue=requeues, reason="PREEMPTION")  # noqa: E731
        self._while_running(job, job.num_starts, self.site.grace_s, end)

    def _requeues(self, job: Job) -> bool:
        return self.site.requeues and job.can_be_requeued

    def end_job(self, job: Job, state: str, *, requeue: bool = False, reason: str = "") -> None:
        if job.state != "RUNNING":
            return
        job.state, job.final, job.is_requeued = "COMPLETING", state, requeue
        self.scheduler.trace("end job", job.name, state, requeue)
        if requeue:
            job.restarts, job.submitted = job.restarts + 1, self.scheduler.now
        if reason:
            job.was_requeued_by_slurm |= requeue
            host = job.nodes[0]
            moment = _clock(self.scheduler.now)
            words = f"*** JOB {job.name} ON {host} CANCELLED AT {moment} DUE TO {reason} ***"
            self.world.print(f"slurmstepd-{host}: error: {words}")
        self.signal_steps(job, signal.SIGTERM)
        if job.batch is not None and job.batch.is_alive:
            job.batch.signal(signal.SIGTERM)
        self.scheduler.call_later(self.site.kill_wait_s, lambda: self._kill_job(job))
        self._check_end(job)

    def _kill_job(self, job: Job) -> None:
        if job.state == "COMPLETING":
            self.signal_steps(job, signal.SIGKILL)
            for step in job.steps:
                step.srun_killed()
            assert job.batch is not None
            job.batch.signal(signal.SIGKILL)
            self._check_end(job)

    def on_batch_exit(self, job: Job, code: int) -> None:
        self.scheduler.trace("batch exit", job.name, code)
        if job.state == "RUNNING":
            requeue = job.was_warned and self.site.keeps_warnings
            requeue = requeue and self.site.preempt_mode == "REQUEUE" and self._requeues(job)
            self.world.on_batch_end(job, is_requeued=requeue)
            self.end_job(job, "COMPLETED" if code == 0 else "FAILED", requeue=requeue)
        # Slurm kills everything else of the job soon after the end of its script.
        self.scheduler.call_later(min(2.0, self.site.kill_wait_s), lambda: self._kill_job(job))

    def _check_end(self, job: Job) -> None:
        if job.state != "COMPLETING":
            return
        assert job.batch is not None
        alive = any(
            rank.is_alive for step in job.steps for rank in step.ranks if rank.host not in self.unresponsive
        )
        if alive or job.batch.is_alive or not job.batch.supervisor.killed:
            self.scheduler.call_later(1.0, lambda: self._check_end(job))
            return
        job.ended = self.scheduler.now
        for step in job.steps:
            step.srun_killed()
        if job.is_requeued:
            job.state = "PENDING"
            job.eligible = job.explicit_start if job.explicit_start is not None else job.ended + _HOLD_S
            job.explicit_start = None
        else:
            job.state = job.final
        self.scheduler.trace("job ended", job.name, job.state)
        self._schedule_soon()

    # -- nodes

    def kill_node(self, node: str, back_after_s: float) -> None:
        """Power off a node. Slurm notices after SlurmdTimeout."""
        if node in self.unresponsive or node in self.down:
            return
        self.scheduler.trace("node dies", node)
        self.outages.append((self.scheduler.now, max(back_after_s, _SLURMD_TIMEOUT_S + 1)))
        self.unresponsive.add(node)
        for job in self.jobs:
            if job.state in ("RUNNING", "COMPLETING") and node in job.nodes:
                for step in job.steps:
                    step.node_died(node)
                if job.nodes[0] == node and job.batch is not None:
                    job.batch.is_alive = False
                    job.batch.supervisor.end(-signal.SIGKILL)
        self.scheduler.call_later(_SLURMD_TIMEOUT_S, lambda: self._mark_down(node))
        self.scheduler.call_later(max(back_after_s, _SLURMD_TIMEOUT_S + 1), lambda: self._node_returns(node))

    def _mark_down(self, node: str) -> None:
        self.down.add(node)
        self.unresponsive.discard(node)
        for job in self.jobs:
            if node in job.nodes and job.state == "RUNNING":
                self.end_job(job, "NODE_FAIL", requeue=self._requeues(job), reason="NODE FAILURE")

    def _node_returns(self, node: str) -> None:
        self.down.discard(node)
        self._schedule_soon()

    def drain_node(self, node: str, seconds: float) -> None:
        """Drain a node for some time; its job continues."""
        self.draining.add(node)
        self.scheduler.call_later(seconds, lambda: self._resume_node(node))

    def _resume_node(self, node: str) -> None:
        self.draining.discard(node)
        self._schedule_soon()

    # -- commands

    def execute(self, words: list[str], environ: Mapping[str, str], issued_at: float) -> tuple[int, str, str]:
        """Execute a command; returns the exit code, stdout and stderr."""
        try:
            return 0, self._execute(words, environ, issued_at), ""
        except CommandFailed as error:
            return 1, "", f"{words[0]}: error: {error}\n"

    def _execute(self, words: list[str], environ: Mapping[str, str], issued_at: float) -> str:
        options = dict(word[2:].partition("=")[::2] for word in words[1:] if word.startswith("--"))
        match words:
            case ["scontrol", "--all", "show", "job", job_id]:
                return self._show(job_id)
            case ["scontrol", "requeue", job_id]:
                return self._requeue(job_id, issued_at)
            case ["scontrol", "show", "config"]:
                site = self.site
                kind = f"PreemptMode = {site.preempt_mode}\nPreemptType = preempt/partition_prio\n"
                return f"JobRequeue = {int(site.requeues)}\nKillWait = {site.kill_wait_s:g} sec\n{kind}"
            case ["scontrol", "--oneliner", "show", "partition", _]:
                return f"PartitionName=main GraceTime={self.site.grace_s:g} State=UP"
            case ["scontrol", "show", "node", hosts]:
                return "\n\n".join(self._show_node(host) for host in expand_hostlist(hosts))
            case ["scontrol", "update", job_word, *changes]:
                return self._update(job_word.partition("=")[2], dict(w.partition("=")[::2] for w in changes))
            case ["squeue", *_] if "steps" in options:
                return self._list_steps(options["jobs"])
            case ["squeue", *_] if options.get("format") == "%L":
                return self._time_left(options["jobs"])
            case ["squeue", *_] if options.get("format") == "%i":
                return "" if self.site.has_free_nodes else "99\n"
            case ["squeue", *_] if "Dependency" in options.get("Format", ""):
                return ""
            case ["squeue", *_]:
                return self._list_commands()
            case ["sinfo", *_]:
                busy = {node for job in self.jobs if job.is_active for node in job.nodes}
                gone = busy | self.down | self.unresponsive | self.draining
                return "\n".join(node for node in self.all_nodes if node not in gone)
            case ["sbatch", *_] if "test-only" in options:
                excluded = set(expand_hostlist(options.get("exclude", "")))
                if len(set(self.all_nodes) - excluded) < self.site.spec.least_granted:
                    raise CommandFailed("allocation failure: Requested node configuration is not available")
                return ""
            case ["sbatch", *_]:
                return self._sbatch(words, options, environ, issued_at)
            case ["scancel", *rest] if "signal" in options:
                return self._signal(options["signal"], rest[1:])
            case ["scancel", job_id]:
                return self.cancel(job_id)
        raise NotImplementedError(words)

    def _known(self, job_id: str) -> Job:
        if (job := self.find(job_id)) is None:
            raise CommandFailed(_INVALID)
        return job

    def _show(self, job_id: str) -> str:
        job = self._known(job_id)
        state, restarts = job.state, job.restarts
        if self.has("stale") and (old := self.world.stale_states.get(job.name)):
            state, restarts = old
        task = (
            ""
            if self.site.array_task is None
            else f" ArrayJobId={job.raw} ArrayTaskId={self.site.array_task}"
        )
        return (
            f"JobId={job.raw}{task} JobName=x\n"
            f"   JobState={state} Reason=None Dependency=(null)\n"
            f"   Requeue={int(self.site.requeues)} Restarts={restarts} BatchFlag=1\n"
            f"   SubmitTime={_clock(job.submitted)} EligibleTime={_clock(job.eligible)}\n"
            f"   WorkDir=/w\n"
        )

    def _requeue(self, job_id: str, issued_at: float) -> str:
        job = self._known(job_id)
        if not self._requeues(job) or self.has("refuse"):
            raise CommandFailed(_REFUSED)
        if job.state == "PENDING":
            raise CommandFailed("Job is pending execution")
        if job.state == "COMPLETING":
            raise CommandFailed("Job/step already completing or completed")
        self.world.on_continuation(job, "requeued", issued_at)
        if job.state == "RUNNING":
            self.end_job(job, "REQUEUED", requeue=True)
        else:
            job.restarts, job.submitted = job.restarts + 1, self.scheduler.now
            job.state, job.eligible = "PENDING", self.scheduler.now + _HOLD_S
            self._schedule_soon()
        return ""

    def _update(self, job_id: str, changes: Mapping[str, str]) -> str:
        job = self._known(job_id)
        for name, value in changes.items():
            if name == "NodeList":
                kept = expand_hostlist(value)
                job.nodes = [node for node in job.nodes if node in kept]
                self._schedule_soon()
            elif name == "ExcNodeList":
                if job.state != "PENDING":
                    raise CommandFailed("Job is no longer pending execution")
                job.excluded = frozenset(expand_hostlist(value))
            elif name == "Requeue":
                job.can_be_requeued = value != "0"
            elif name == "StartTime":
                moment = self.scheduler.now + float(value.removeprefix("now+"))
                if job.state == "PENDING":
                    job.eligible = moment
                    self._schedule_soon()
                elif job.is_requeued:
                    job.explicit_start = moment
        return ""

    def _list_steps(self, job_ids: str) -> str:
        lines = []
        for job_id in job_ids.split(","):
            job = self._known(job_id)
            if job.state in ("RUNNING", "COMPLETING"):
                lines += [f"{job.name}.batch batch"]
                lines += [f"{job.name}.{step.number} {step.name}" for step in job.steps if step.is_listed]
        return "\n".join(lines)

    def _time_left(self, job_id: str) -> str:
        job, limit = self._known(job_id), self.site.spec.time_limit_s
        if limit is None:
            return "UNLIMITED\n"
        left = max(0, int(job.started + limit - self.scheduler.now))
        return f"{left // 3600:d}:{left // 60 % 60:02d}:{left % 60:02d}\n"

    def _list_commands(self) -> str:
        folder = self.world.array_folder
        lines = []
        for job in self.jobs:
            if self.find(str(job.raw)) is not job:
                continue
            if self.has("stale") and job.submitted > self.scheduler.now - 5.0:
                continue
            task = "N/A" if self.site.array_task is None else str(self.site.array_task)
            command = f"/w/job.sbatch {job.argv}".strip()
            cells = [str(job.raw), task, str(job.raw), f"/w/{folder}", command, ""]
            lines.append("\x1f".join(cells))
        return "\n".join(lines)

    def _show_node(self, node: str) -> str:
        state = "DOWN*" if node in self.down else "ALLOCATED"
        state += "+DRAIN" * (node in self.draining)
        return f"NodeName={node} NodeAddr={node} Port=6818 State={state} RealMemory=8000 MemSpecLimit=0"

    def _sbatch(
        self, words: list[str], options: Mapping[str, str], environ: Mapping[str, str], issued_at: float
    ) -> str:
        if self.has("refuse"):
            raise CommandFailed("Batch job submission failed: Access/permission denied")
        marker = words[-1] if words[-1].startswith("continues-job-") else ""
        predecessor = environ.get(PREDECESSOR_VARIABLE)
        job = self.submit(
            marker,
            predecessor=predecessor,
            after=options.get("dependency", "").partition(":")[2] or None,
            excluded=frozenset(expand_hostlist(options.get("exclude", ""))),
        )
        self.world.on_continuation(job, "submitted", issued_at)
        return f"{job.raw}\n"

    def _signal(self, name: str, steps: list[str]) -> str:
        for step_id in steps:
            job_id, _, number = step_id.rpartition(".")
            job = self._known(job_id)
            for step in job.steps:
                if str(step.number) == number and step.is_listed:
                    step.signal(signal.Signals[f"SIG{name}"])
        return ""

    def cancel(self, job_id: str) -> str:
        job = self._known(job_id)
        if job.state == "PENDING":
            job.state, job.ended = "CANCELLED", self.scheduler.now
            self._schedule_soon()
        else:
            self.end_job(job, "CANCELLED")
        return ""


class CommandFailed(Exception):
    """The error message of a command."""


class SimPopen:
    """A process that the supervisor starts, with the interface of `subprocess.Popen`."""

    def __init__(self, args: list[str], *, env: Mapping[str, str] | None = None, **_: object) -> None:
        world = _world()
        scheduler = world.scheduler
        scheduler.step()
        self._world, self._scheduler = world, scheduler
        self.args, self.environ = args, dict(env or {})
        self.returncode: int | None = None
        self._waiting: list[SimThread] = []
        self._lines: list[str] = []
        self._out = self._err = ""
        self.pid = 0
        self.owner = scheduler.process
        self.stderr = self
        words = args[next((i for i, word in enumerate(args) if word in _COMMANDS), 0) :]
        if words[0] == "srun":
            world.start_step(self, words)
        elif words[0] in _COMMANDS:
            self._request(words)
        else:
            scheduler.call_later(1.0, lambda: self.finish(0))

    def _request(self, words: list[str]) -> None:
        slurm, random = self._world.slurm, self._scheduler.random
        issued_at, latency = self._scheduler.now, random.uniform(0.01, 0.3)
        if slurm.has("slow"):
            latency += random.choice((0.0, 5.0, 70.0))

        def execute() -> None:
            if slurm.has("away"):
                error = f"{words[0]}: error: {_AWAY}\n"
                self._scheduler.call_later(2.0, lambda: self.finish(1, "", error))
                return
            lost = slurm.has("lost-answers") and random.random() < 0.5
            code, out, err = slurm.execute(words, self.environ, issued_at)
            self._scheduler.trace(" ".join(words[:6]), code, err.strip())
            if lost:
                code, out, err = 1, "", f"{words[0]}: error: {_TIMED_OUT}\n"
            self._scheduler.call_later(latency, lambda: self.finish(code, out, err))

        if slurm.has("silent"):
            return
        self._scheduler.call_later(latency, execute)

    def finish(self, code: int, out: str = "", err: str = "") -> None:
        if self.returncode is None:
            self.returncode, self._out, self._err = code, out, err
            self._wake()

    def print_line(self, line: str) -> None:
        self._lines.append(line)
        self._wake()

    def _wake(self) -> None:
        for thread in self._waiting:
            self._scheduler.wake(thread)
        self._waiting.clear()

    def poll(self) -> int | None:
        self._scheduler.check_alive()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._scheduler.step()
        deadline = None if timeout is None else self._scheduler.now + timeout
        while self.returncode is None:
            assert self._scheduler.running is not None
            self._waiting.append(self._scheduler.running)
            if not self._scheduler.park(deadline) and self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, stdin: bytes | None = None, timeout: float | None = None) -> tuple[str, Any]:
        if stdin is not None:
            self._world.on_notification(stdin)
        self.wait(timeout)
        return self._out, self._err

    def __iter__(self) -> SimPopen:
        return self

    def __next__(self) -> str:
        while not self._lines:
            if self.returncode is not None:
                raise StopIteration
            assert self._scheduler.running is not None
            self._waiting.append(self._scheduler.running)
            self._scheduler.park()
        return self._lines.pop(0)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._scheduler.check_alive()
        step = self._world.step_of(self)
        if step is not None:
            step.signal_srun(number)
        else:
            self.finish(-number)

    def __enter__(self) -> SimPopen:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def __class_getitem__(cls, _: object) -> type[SimPopen]:
        return cls


def _world() -> World:
    return Scheduler.current.world


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(EPOCH + moment).isoformat(timespec="seconds")
