"""A simulated world: the run folder, Slurm, the ranks, the faults and the invariants."""

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.run_histories import most_attempts

from hpctrain.errors import EXIT_CONTINUE
from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.record_types import LeaseHolder
from hpctrain.records.lease import EXPIRY_S, RENEW_INTERVAL_S, encode_holder
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import RunDir, event_record
from hpctrain.slurm.prepare_job_end import prepare_job_end
from hpctrain.supervisor import batch_main
from simulation import simulated_system as system
from simulation.config import Fault, ForeignProgram, SimConfig
from simulation.rank_step import HeartbeatServer, RankStep, SimRank
from simulation.scheduler import EPOCH, Scheduler, SimProcess, Violation
from simulation.simulated_disk import SimDisk, use_disk
from simulation.simulated_slurm import NO_ANSWER, Job, SimPopen, SimSlurm

#: Virtual seconds after which a run must have ended.
_HORIZON_S = 20_000.0
_MAX_ATTEMPTS = 40
#: The supervisor may end the run while another of its threads requests a continuation.
_RACE_S = 1.0
#: Time limit to handle a message of a rank, or to check the ranks.
_HANDLING_S = 10.0


class World:
    def __init__(self, seed: int, config: SimConfig, faults: Sequence[Fault], root: Path) -> None:
        self.config, self.faults, self.root = config, faults, root
        self.scheduler = Scheduler(seed)
        self.scheduler.world, self.scheduler.root = self, str(root)
        self.scheduler.yield_probability = config.yield_probability
        self.disk = SimDisk(self.scheduler, str(root))
        self.run = RunDir(Path(config.spec.run_dir))
        self.array_folder = (self.run.array or self.run).path.name
        self.slurm = SimSlurm(self)
        self.servers: dict[str, HeartbeatServer] = {}
        self.stale_states: dict[str, tuple[str, int]] = {}
        self.committed: list[tuple[int, int]] = []
        """Step and attempt of each commit."""
        self.has_trained = False
        self.user_cancelled = self.crashes_again = False
        self.foreign_program: ForeignProgram | None = None
        self._num_crashes = 0
        """Number of crashes at the same place."""
        self._notified: set[tuple[str, float]] = set()
        """Occasion and time of each notification."""
        self._jobs_after: dict[str, set[str]] = {}
        self._steps: list[RankStep] = []

    # -- life

    def simulate(self) -> None:
        """Run until nothing happens any more, and check the end."""
        self.run.path.mkdir(parents=True)
        self.run.logs.mkdir()
        self.run.spec.write_text("simulated")
        for fault in self.faults:
            self._plan(fault)
        self.scheduler.call_at(_HORIZON_S, self._fail_horizon)
        self._submit()
        use_disk(self.disk)
        try:
            self.scheduler.run()
        finally:
            use_disk(None)
        self._check_end()

    def _submit(self) -> None:
        job = self.slurm.submit()
        record = event_record("submitted", 0, job_id=job.name, backend="slurm")
        self.scheduler.call_later(self.config.submit_delay_s, lambda: self.append(self.run.events, record))

    def run_supervisor(self, job: Job, environ: Mapping[str, str], deaths: int) -> int:
        """The main thread of a supervisor process. See `hpctrain.supervisor.__main__`."""
        system.sleep(self.scheduler.random.uniform(0.2, 2.0))
        code = batch_main.main([str(self.run.array or self.run)], environ, deaths=deaths)
        prepare_job_end(environ, code)
        return code

    def on_supervisor_exit(self, job: Job, code: int) -> None:
        for server in list(self.servers.values()):
            if server.process is not None and server.process.killed:
                server.on_process_end()

    def start_step(self, popen: SimPopen, words: list[str]) -> None:
        self._steps.append(RankStep(self, popen, words))
        popen.step = self._steps[-1]  # type: ignore[attr-defined]

    def step_of(self, popen: SimPopen) -> RankStep | None:
        return getattr(popen, "step", None)

    def kill_orphans(self, host: str, before: int) -> None:
        for step in self._steps:
            if step.attempt < before:
                for rank in step.ranks:
                    if rank.host == host:
                        rank.exit(None, signal.SIGKILL)
                if step.popen.owner is not None and step.popen.owner.host == host:
                    step.popen.finish(-signal.SIGKILL)

    def print(self, line: str) -> None:
        with open(self.run.slurm_log, "a") as log:
            log.write(line + "\n")

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        with open(path, "ab+") as file:
            if file.tell() and not _ends_line(file):
                file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")
        self.scheduler.trace("event", record.get("kind"), record.get("step"))

    # -- faults

    def _plan(self, fault: Fault) -> None:
        scheduler, kind = self.scheduler, fault.kind
        if kind == "kill-supervisor":
            scheduler.kill_at_steps.add(int(fault.at))
        elif kind == "torn-write":
            self.disk.torn_writes.add(int(fault.at))
        elif kind.startswith("slurm-"):
            self.slurm.windows.append((kind.removeprefix("slurm-"), fault.at, fault.at + fault.value))
            if kind == "slurm-stale":
                scheduler.call_at(fault.at, self._remember_states)
        elif kind.startswith("disk-"):
            self.disk.windows.append((kind.removeprefix("disk-"), fault.at, fault.at + fault.value))
        elif kind == "messages-late":
            self.slurm.windows.append(("late", fault.at, fault.at + fault.value))
        else:
            scheduler.call_at(fault.at, lambda: self._inject(fault))

    def _remember_states(self) -> None:
        """Let Slurm report running jobs as they are now, also after their end."""
        running = [job for job in self.slurm.jobs if job.state == "RUNNING"]
        self.stale_states = {job.name: (job.state, job.restarts) for job in running}

    def _inject(self, fault: Fault) -> None:
        running = [job for job in self.slurm.jobs if job.state == "RUNNING"]
        step = next((step for step in reversed(self._steps) if step.trains), None)
        self.scheduler.trace("fault", fault)
        match fault.kind:
            case "preempt" if running:
                self.slurm.preempt(running[0])
            case "kill-batch" if running and running[0].batch is not None:
                running[0].batch.kill_script()
            case "kill-node" if running:
                nodes = running[0].nodes
                self.slurm.kill_node(nodes[int(fault.value) % len(nodes)], 300.0)
            case "drain-node" if running:
                nodes = running[0].nodes
                self.slurm.drain_node(nodes[int(fault.value) % len(nodes)], 300.0)
            case "pause-supervisor" if running and running[0].batch is not None:
                running[0].batch.supervisor.paused_until = self.scheduler.now + fault.value
            case "cancel":
                self._cancel()
            case "steal-lease" if running and running[0].batch is not None:
                self._steal_lease(running[0].batch.supervisor)
            case "crash-again":
                self.crashes_again = True
            case "start-over":
                self.foreign_program = ForeignProgram(int(fault.value))
            case "start-by-hand" if running:
                self.slurm.submit(is_by_hand=True)
            case "requeue" if step is not None:
                self.run.requeue_request.write_text(f"{step.attempt}\n")
                step.signal(signal.SIGTERM)
            case _ if step is not None:
                self._harm(step, step.ranks[int(fault.value) % len(step.ranks)], fault.kind)

    def _harm(self, step: RankStep, rank: SimRank, kind: str) -> None:
        match kind:
            case "crash":
                step.fail(rank, "ValueError", f"bad value at {self.scheduler.now:.0f}")
            case "gpu-fault":
                step.fail(rank, "RuntimeError", "CUDA error: uncorrectable ECC error encountered")
            case "kill":
                rank.exit(None, signal.SIGKILL)
            case "oom":
                rank.exit(None, signal.SIGKILL, words="Out Of Memory")
            case "hang":
                rank.is_hung = True
            case "silence":
                rank.is_hung = rank.is_silent = True
            case "lost-report":
                step.report_is_lost = True

    def _steal_lease(self, holder: SimProcess) -> None:
        """Create a newer lease, as another job does that considers the holder dead."""
        numbers = self.run.leases()
        if not numbers or self._lease_process(numbers[-1]) is not holder:
            return
        newer, moment = self.run.lease(numbers[-1] + 1), system.time()
        newer.write_bytes(encode_holder(LeaseHolder("99")))
        os.utime(newer, (moment, moment))
        excused = {"pause-supervisor", *(f.kind for f in self.faults if f.kind.startswith("disk-"))}

        def check() -> None:
            if not holder.killed and excused.isdisjoint(fault.kind for fault in self.faults):
                self.fail(f"{holder.name} has lost its lease, but does not exit")

        self.scheduler.call_later(2 * RENEW_INTERVAL_S, check)

    def _lease_process(self, number: int) -> SimProcess | None:
        """Return the process that holds a lease; None if it has ended or released the lease."""
        with suppress(OSError, ValueError):
            holder = json.loads(self.run.lease(number).read_bytes())
            processes = [each for each in self.scheduler.processes if each.pid == holder["pid"]]
            return next((each for each in processes if not holder["released"] and not each.killed), None)
        return None

    def _cancel(self) -> None:
        """Cancel the run as `hpctrain cancel` does."""
        job = self.slurm.jobs[-1]
        if not job.is_active:
            return
        self.user_cancelled = True
        for step in self._steps:
            step.is_cancelled = step.trains
        self.run.cancel_request.touch()
        moment = system.time()
        os.utime(self.run.cancel_request, (moment, moment))
        if job.state == "PENDING":
            self.slurm.cancel(job.name)
        else:
            self.slurm.signal_steps(job, signal.SIGTERM)
            self.scheduler.call_later(200.0, self._cancel_again)

    def _cancel_again(self) -> None:
        for job in self.slurm.jobs:
            if job.is_active:
                self.slurm.cancel(job.name)

    # -- invariants

    def fail(self, words: str) -> None:
        self.scheduler.trace("VIOLATION", words)
        # The supervisor may catch the exception.
        self.scheduler.failure = self.scheduler.failure or Violation(words)
        raise self.scheduler.failure

    def _fail_horizon(self) -> None:
        if any(job.is_active for job in self.slurm.jobs):
            self.fail(f"the run has not ended after {_HORIZON_S:.0f} s")

    def on_rank_start(self, step: RankStep, rank: SimRank) -> None:
        if rank is step.ranks[-1] and not step.is_standby and not step.is_check:
            self.on_attempt_start(step)

    def on_link(self, path: str) -> None:
        """Check a new lease: its previous holder has ended, or could not renew its lease."""
        lease = Path(path)
        if lease.parent.name != "lease":
            return
        holder = self._lease_process(int(lease.name) - 1)
        if holder in (None, self.scheduler.process):
            return
        age_s = system.time() - self.run.lease(int(lease.name) - 1).stat().st_mtime
        excused = self.disk.windows or any(fault.kind == "pause-supervisor" for fault in self.faults)
        if age_s < EXPIRY_S or not excused:
            self.fail(f"a lease is claimed although {holder.name} holds it, renewed {age_s:.0f} s ago")

    def on_crash_again(self) -> None:
        self._num_crashes += 1
        num_runs = 1
        # Slurm may have requeued the job before the supervisor recorded a failure.
        if any(job.was_requeued_by_slurm for job in self.slurm.jobs):
            num_runs += sum(event.state == "FAILED" for event in self.run.read_events())
        # A supervisor that is killed while ranks fail does not record their failure.
        num_kills = sum(
            fault.kind in ("kill-batch", "kill-supervisor", "torn-write") for fault in self.faults
        )
        allowed = self.config.spec.max_failures
        if (program := self.foreign_program) is not None:
            # Another fault, a stop or a requeue may become the recorded end of the attempt.
            ends = [EndKind(event.end_kind) for event in self.run.read_events() if event.end_kind]
            stops = [kind for kind in ends if kind.is_stop]
            num_kills = len(self.faults) + len(stops) + sum(job.restarts for job in self.slurm.jobs)
            failures, policy = {*ends} - {*stops} or {EndKind.PYTHON}, self.config.spec.policy
            allowed = most_attempts(policy, failures, writes_files=program.writes_files)
        most = allowed * num_runs + num_kills
        if self._num_crashes > most and not self.disk.windows:
            self.fail(f"the run continues after {self._num_crashes - 1} crashes at the same place")

    def on_agreed_stop(self, step: RankStep) -> None:
        if step.stop_after is not None and step.stop_after < step.can_stop_after:
            self.fail(
                f"ranks stop after step {step.stop_after}, but one has begun step {step.can_stop_after}"
            )

    def on_messages_handled(self, seconds: float) -> None:
        paused = any(fault.kind == "pause-supervisor" for fault in self.faults)
        if seconds > _HANDLING_S and not paused:
            self.fail(f"the supervisor received no messages from ranks for {seconds:.0f} s")

    def on_notification(self, message: bytes) -> None:
        said = json.loads(message)
        key = said["occasion"], said["time"]
        # The supervisor of a second job sends notifications until it finds the first.
        if key in self._notified and not any(job.is_by_hand for job in self.slurm.jobs):
            self.fail(f"the user is notified twice: {said['text']}")
        self._notified.add(key)

    def on_attempt_start(self, step: RankStep) -> None:
        for other in self._steps:
            if other is step or other.popen.owner is not step.popen.owner or other.is_check:
                continue
            if other.attempt == step.attempt and other.is_launched and not other.is_standby:
                self.fail(f"attempt {step.attempt} starts twice")
            if other.attempt <= step.attempt and other.is_standby and any(r.is_alive for r in other.ranks):
                self.fail(f"attempt {step.attempt} starts beside standby workers for attempt {other.attempt}")
        if len({*step.hosts}) < len(step.hosts):
            self.fail(f"attempt {step.attempt} uses a node twice: {step.hosts}")
        others = [other for other in self._steps if other.attempt != step.attempt and other.trains]
        if others:
            self.fail(f"attempt {step.attempt} starts while attempt {others[0].attempt} is alive")
        if step.attempt > _MAX_ATTEMPTS and self.foreign_program is None:
            self.fail(f"{_MAX_ATTEMPTS} attempts")
        if self.run.cancel_request.exists() and any(other.is_cancelled for other in self._steps):
            self.fail(f"attempt {step.attempt} starts although its ranks were cancelled")
        if step.job.is_by_hand:
            self.fail("a job that hpctrain did not submit trains")
        if (finished := self._finished_before(self.scheduler.now)) is not None:
            self.fail(f"attempt {step.attempt} starts although the run is {finished}")
        if (predecessor := step.job.predecessor) is not None:
            jobs = self._jobs_after.setdefault(predecessor, set())
            jobs.add(step.job.name)
            if len(jobs) > 1:
                self.fail(f"jobs {sorted(jobs)} both continue job {predecessor}")

    def on_continuation(self, job: Job, what: str, issued_at: float) -> None:
        if (finished := self._finished_before(issued_at)) is not None:
            self.fail(f"job {job.name} is {what}, although the run is {finished}")
        alike = [other.name for other in self.slurm.jobs if other.argv == job.argv and other.is_active]
        # Slurm may execute or list a submission late.
        is_late = any(fault in ("slow", "stale") for fault, _, _ in self.slurm.windows)
        if what == "submitted" and len(alike) > 1 and not is_late:
            self.fail(f"jobs {alike} have the same predecessor")

    def on_batch_end(self, job: Job, *, is_requeued: bool) -> None:
        assert job.batch is not None
        code = job.batch.supervisor.code
        has_exited = code is not None and code >= 0 and code != EXIT_CONTINUE
        if not (is_requeued and has_exited and job.restarts) or self.slurm.windows:
            return
        if (finished := self._finished_before(self.scheduler.now)) is not None:
            self.fail(f"Slurm requeues job {job.name}, although the run is {finished}")

    def _finished_before(self, moment: float) -> str | None:
        for event in self.run.read_events():
            if event.kind == "finished" and event.time < EPOCH + moment - _RACE_S:
                return event.state
        return None

    def on_resume(self, step: RankStep) -> None:
        newest = max((step for step, _ in self.committed), default=0)
        if step.base != newest:
            self.fail(f"attempt {step.attempt} resumes from step {step.base}, but step {newest} is committed")

    def before_commit(self, step: RankStep, number: int) -> None:
        newest, by = max(self.committed, default=(0, step.attempt))
        if newest != max(step.last_commit, 0):
            self.fail(
                f"attempt {step.attempt} commits step {number} after step {step.last_commit}, "
                f"but attempt {by} has committed step {newest}"
            )

    def after_commit(self, step: RankStep, number: int) -> None:
        self.committed.append((number, step.attempt))
        self.scheduler.trace("commit", number, "by attempt", step.attempt)

    def after_retention(self) -> None:
        steps = sorted({step for step, _ in self.committed})
        for step in reversed(steps[-self.config.keep_last :]):
            if not (self.run.checkpoint(step) / "manifest.json").exists():
                self.fail(f"a checkpoint to keep was deleted: step {step} of {steps}")

    def on_trained(self, step: RankStep) -> None:
        self.has_trained = True

    def _check_end(self) -> None:
        for step in self._steps:
            if any(rank.is_alive for rank in step.ranks) or step.popen.returncode is None:
                self.fail(f"step {step.name} of job {step.job.name} is left behind")
        end = read_run_record(self.run).finished
        state, cause, note = (
            (end.state, end.cause or "", end.note or "") if end is not None else (None, "", "")
        )
        self.scheduler.trace("end", state, cause)
        last = self.slurm.jobs[-1]
        self.outcome = state or f"none ({last.state})"
        if state == "COMPLETED" and not self.has_trained:
            self.fail("the run is COMPLETED, but no attempt has trained to the end")
        is_committed = max(self.committed, default=(0, 0))[0] == self.config.num_steps
        if state == "COMPLETED" and not is_committed and self.foreign_program is None:
            self.fail("the run is COMPLETED, but its last step is not committed")
        if state == "CANCELLED" and not self.user_cancelled:
            self.fail("the run is CANCELLED, but not by the user")
        if state == "FAILED" and not cause:
            self.fail("the run is FAILED without a cause")
        if state == "FAILED" and any(words in cause + note for words in NO_ANSWER):
            self.fail(f"the run is FAILED, although Slurm only did not respond: {cause} {note}")
        for event in self.run.read_events():
            if event.kind == "grow":
                self._check_growth(event.nodes, event.time - EPOCH)
        killed = any((process.code or 0) < 0 for process in self.scheduler.processes)
        killed = killed or any(fault.kind == "steal-lease" for fault in self.faults)
        notifies = self.config.spec.notify.targets and not killed and not self.disk.windows
        if notifies and state and not any(occasion == "finish" for occasion, _ in self._notified):
            self.fail("the user is not notified of the end")
        evicted = last.final in ("PREEMPTED", "NODE_FAIL") and self.config.spec.resume_mode != "requeue"
        code = last.batch.supervisor.code if last.batch is not None else None
        evicted = evicted and not self.user_cancelled and not self.disk.windows
        if state is None and evicted and code == EXIT_CONTINUE:
            self.fail(f"job {last.name} exits to be continued, but no job continues the run")
        if self._must_complete() and state != "COMPLETED":
            self.fail(f"with at most one survivable fault, the run ended as {self.outcome}")

    def _check_growth(self, nodes: int, moment: float) -> None:
        down = sum(begin + 5.0 < moment < begin + duration for begin, duration in self.slurm.outages)
        if any(fault == "slow" for fault, _, _ in self.slurm.windows):
            return
        if nodes > len(self.slurm.all_nodes) - down:
            self.fail(f"the run is requeued for {nodes} nodes, although {down} are down")

    def _must_complete(self) -> bool:
        spec, faults = self.config.spec, self.faults
        if not self.config.requeues and spec.resume_mode == "requeue":
            return False
        survives = len(faults) == 1 and spec.time_limit_s is None and faults[0].is_survivable
        return not faults or survives

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _ends_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")
