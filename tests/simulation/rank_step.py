"""The ranks of a job step, as callbacks: they train in lockstep, save, stop, fail, hang and fall silent."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.io.retention import Retention
from hpctrain.cluster import expand_hostlist
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.rundir import (
    ATTEMPT_VARIABLE,
    STANDBY_VARIABLE,
    SUPERVISOR_ADDRESS_VARIABLE,
    event_record,
    list_checkpoint_steps,
)
from simulation import simulated_system as system
from simulation.config import ForeignProgram
from simulation.scheduler import Scheduler
from simulation.simulated_slurm import Job, SimPopen

if TYPE_CHECKING:
    from simulation.world import World

TICK_S = 5.0
_NAMES = {number: signal.strsignal(number) for number in signal.Signals}


class SimRank:
    def __init__(self, step: RankStep, rank: int, host: str) -> None:
        self.step, self.rank, self.host = step, rank, host
        self.is_alive = False
        self.is_hung = self.is_silent = False

    def start(self) -> None:
        self.is_alive = True
        self.step.world.on_rank_start(self.step, self)

    def exit(self, code: int | None, number: int | None = None, *, words: str | None = None) -> None:
        """End the process; srun reports it a little later."""
        if not self.is_alive:
            return
        self.is_alive = False
        step = self.step
        step.world.scheduler.trace("rank exits", step.name, self.rank, code, number or "")
        if step.server is not None:
            step.server.disconnect(step.attempt, self.rank)
        if code != 0:
            text = words or (_NAMES[number] if number else f"Exited with exit code {code}")
            line = f"srun: error: {self.host}: task {self.rank}: {text}"
            step.later(0.0, 0.5, lambda: step.popen.print_line(line))
        step.on_rank_exit(self)

    def heartbeat(self) -> Mapping[str, Any]:
        step = self.step
        return {
            "beats": step.beats,
            "phase": step.phase,
            "step": step.steps_done,
            "spent": [0.0, 0.0, 0.0],
            "timed": [step.steps_done, step.steps_done],
            "modules": ["torch"],
            "changed": [],
        }


class RankStep:
    def __init__(self, world: World, popen: SimPopen, words: list[str]) -> None:
        self.world, self.popen, self.scheduler = world, popen, world.scheduler
        options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        environ = popen.environ
        job = world.slurm.find(environ["SLURM_JOB_ID"])
        assert job is not None
        self.job: Job = job
        self.name = options["job-name"]
        self.attempt = int(environ[ATTEMPT_VARIABLE])
        self.is_standby = STANDBY_VARIABLE in environ
        self.is_check = any("node_check" in word for word in words)
        self.number = len(job.steps)
        count = int(options["nodes"])
        self.hosts = expand_hostlist(options["nodelist"]) if "nodelist" in options else job.nodes[:count]
        per_node = int(options["ntasks-per-node"])
        self.ranks = [SimRank(self, i, self.hosts[i // per_node]) for i in range(count * per_node)]
        self.server: HeartbeatServer | None = None
        self.address = environ.get(SUPERVISOR_ADDRESS_VARIABLE, "")
        self.phase, self.beats, self.steps_done = "start", 0, 0
        self.base = self.last_commit = -1
        self.stop_signal: int | None = None
        self.stop_after: int | None = None
        self.can_stop_after = -1
        """The latest step that a rank has named."""
        self.is_cancelled = False
        self.is_saving = self.is_leaving = self.is_launched = self.is_aborted = False
        self.report_is_lost = False
        job.steps.append(self)
        self.later(0.5, 2.0, self._launch)

    @property
    def run(self) -> Any:
        return self.world.run

    @property
    def is_listed(self) -> bool:
        lost = any(rank.host in self.world.slurm.unresponsive for rank in self.ranks)
        return self.is_launched and (any(rank.is_alive for rank in self.ranks) or lost)

    @property
    def trains(self) -> bool:
        """True if the ranks can train and commit checkpoints."""
        return not (self.is_standby or self.is_check) and any(rank.is_alive for rank in self.ranks)

    @property
    def _can_progress(self) -> bool:
        return self.is_launched and all(rank.is_alive and not rank.is_hung for rank in self.ranks)

    def later(self, low: float, high: float, action: Any) -> None:
        self.scheduler.call_later(self.scheduler.random.uniform(low, high), action)

    # -- start

    def _launch(self) -> None:
        if self.popen.returncode is not None or self.is_aborted:
            return
        slurm = self.world.slurm
        lost = [host for host in self.hosts if host in slurm.down | slurm.unresponsive]
        if lost or self.job.state != "RUNNING" or not set(self.hosts) <= set(self.job.nodes):
            host = lost[0] if lost else self.hosts[0]
            self.popen.print_line(
                f"srun: error: Task launch for StepId=1 failed on node {host}: Communication failure"
            )
            self.later(1.0, 5.0, lambda: self.popen.finish(1))
            return
        self.is_launched = True
        self.scheduler.trace("launch", self.name, *self.hosts)
        if not self.is_standby:
            for host in self.hosts:
                self.world.kill_orphans(host, self.attempt)
        for rank in self.ranks:
            rank.start()
        if self.is_check:
            self.later(1.0, 3.0, self._check_node)
        else:
            self.later(0.5, 2.0, self._connect)

    def _check_node(self) -> None:
        for rank in self.ranks:
            path = self.run.node_check_result(self.attempt, rank.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"trouble": []}))
            rank.exit(0)

    def _connect(self) -> None:
        self.server = self.world.servers.get(self.address)
        if self.server is not None:
            for rank in self.ranks:
                if rank.is_alive:
                    self.server.connect(self.attempt, rank)
                    if not self.is_standby:
                        self.server.receive(self.attempt, rank.rank, rank.heartbeat())
        if self.is_standby:
            self.later(1.0, 4.0, self._report_ready)
        else:
            self.later(0.5, 2.0, self._load)

    def _report_ready(self) -> None:
        for rank in self.ranks:
            if rank.is_alive and self.server is not None and self.is_standby:
                self.server.receive(self.attempt, rank.rank, {"ready": True})

    def _load(self) -> None:
        if not self._can_progress:
            return
        self._progress("load")
        if self.world.foreign_program is not None:
            self._run_foreign(self.world.foreign_program)
            return
        committed = list_checkpoint_steps(self.run.checkpoints)
        self.base = self.last_commit = self.steps_done = max(committed, default=0)
        self.world.on_resume(self)
        if committed:
            self._log_event("resumed", step=self.base)
        if self.world.crashes_again:
            if committed:
                self._log_event("checkpoint", step=self.base, path=str(self.run.checkpoint(self.base)))
            self.later(0.5, 2.0, self._crash_again)
        self.later(0.5, 2.0, self._begin)

    def _run_foreign(self, program: ForeignProgram) -> None:
        """Train a few steps without a checkpoint of hpctrain, and then fail or complete."""
        self.base = self.last_commit = self.steps_done = 0
        path = self.run.checkpoints / "last.ckpt"
        saved = int(path.read_text()) if program.loads_files and path.exists() else 0
        if program.counts_steps:
            self._log_event("resumed", step=3 * self.attempt)
        if program.writes_files:
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(saved + 1))
        self._progress("step")
        is_done = program.loads_files and saved >= self.world.config.num_steps // 2
        self.later(
            *self.world.config.step_range_s,
            (lambda: self._leave(0)) if is_done else lambda: self._fail_again(program),
        )

    def _fail_again(self, program: ForeignProgram) -> None:
        rank = self.ranks[-1]
        if not rank.is_alive or rank.is_hung:
            return
        if not program.loads_files:
            self.world.on_crash_again()
        match program.way_to_fail(self.attempt):
            case "exception":
                self.fail(rank, "ValueError", f"bad value in attempt {self.attempt}")
            case "kill":
                rank.exit(None, signal.SIGKILL)
            case "hang":
                rank.is_hung = True
            case "early exit":
                rank.exit(0)
            case "oom":
                rank.exit(None, signal.SIGKILL, words="Out Of Memory")
            case "signal":
                rank.exit(None, signal.SIGSEGV)
            case "data worker":
                self.fail(rank, "DataWorkerKilled", "a data worker was killed by SIGKILL")
            case "exit code":
                rank.exit(3)

    def _crash_again(self) -> None:
        if self.ranks[0].is_alive:
            self.world.on_crash_again()
            self.fail(self.ranks[0], "ValueError", "bad value again")

    def _begin(self) -> None:
        if self._can_progress:
            self._progress("step")
            self._after_step()

    def _progress(self, phase: str) -> None:
        self.phase = phase
        self.beats += 1

    # -- training

    def _after_step(self) -> None:
        """Decide what follows the step that has just ended."""
        config = self.world.config
        if self.steps_done >= config.num_steps:
            self._save(lambda: self._leave(0))
        elif self._must_stop():
            assert self.stop_signal is not None
            self._log_event("signal", signal=signal.Signals(self.stop_signal).name, step=self.steps_done)
            self._save(lambda: self._leave(EXIT_CONTINUE))
        elif self.steps_done - max(self.last_commit, 0) >= config.save_every:
            self._save(self._next_step)
        else:
            self._next_step()

    def _must_stop(self) -> bool:
        if self.world.config.agrees_through_supervisor:
            return self.stop_after is not None and self.steps_done >= self.stop_after
        return self.stop_signal is not None

    def _next_step(self) -> None:
        if self._can_progress:
            self._progress("step")
            self.later(*self.world.config.step_range_s, self._end_step)

    def _end_step(self) -> None:
        if self._can_progress and not self.is_saving:
            self.steps_done += 1
            self.beats += 1
            self._after_step()

    def _save(self, then: Any) -> None:
        if self.steps_done == self.last_commit or self.steps_done == 0:
            then()
            return
        self._progress("save")
        self.is_saving = True
        begun = self.scheduler.now

        def commit() -> None:
            self.is_saving = False
            if not self._can_progress:
                return
            try:
                self.world.disk.check(self.run.path, writes=True)
            except OSError as error:
                self._fail_save(str(error), then)
                return
            self._commit(self.scheduler.now - begun)
            then()

        self.later(*self.world.config.save_range_s, commit)

    def _fail_save(self, words: str, then: Any) -> None:
        if self.stop_signal is None and self.steps_done < self.world.config.num_steps:
            then()
        else:
            self.fail(self.ranks[0], "DiskFull", f"disk full: {words}")

    def _commit(self, seconds: float) -> None:
        step, run = self.steps_done, self.run
        self.world.before_commit(self, step)
        temporary = run.checkpoints / f".step-{step}.tmp"
        final = run.checkpoint(step)
        temporary.mkdir(parents=True)
        (temporary / "manifest.json").write_text("{}")
        os.rename(temporary, final)
        self.last_commit = step
        self.world.after_commit(self, step)
        kept = Retention(last=self.world.config.keep_last)
        steps = list_checkpoint_steps(run.checkpoints)
        for old in set(steps) - kept.steps_to_keep(dict.fromkeys(steps)):
            shutil.rmtree(run.checkpoint(old))
        self.world.after_retention()
        self._log_event("checkpoint", step=step, path=str(final), seconds=seconds, tier="shared")
        record = {"time": system.time(), "attempt": self.attempt, "step": step, "loss": 1.0}
        self._append(run.metrics, record)

    def _log_event(self, kind: Any, **fields: Any) -> None:
        self._append(self.run.events, event_record(kind, self.attempt, **fields))

    def _append(self, path: Any, record: Mapping[str, Any]) -> None:
        """Append a line; while the disk is unusable, retry as long as the rank lives."""
        try:
            self.world.disk.check(path, writes=True)
        except OSError:
            self.later(1.0, 1.0, lambda: self.ranks[0].is_alive and self._append(path, record))
            return
        self.world.append(path, record)

    def _leave(self, code: int) -> None:
        self.is_leaving = True
        self._progress("end")
        if code == 0:
            self.world.on_trained(self)
        for rank in self.ranks:
            self.later(0.0, 2.0, lambda rank=rank: rank.exit(code))

    # -- failures

    def fail(self, rank: SimRank, error: str, message: str) -> None:
        if not rank.is_alive:
            return
        record = {"rank": rank.rank, "host": rank.host, "kind": "exception", "error": error}
        record |= {"message": message, "log": "rank.log", "order": rank.rank, "time": system.time()}
        with suppress(OSError):
            self.world.disk.check(self.run.path, writes=True)
            path = self.run.failure(self.attempt, rank.rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(record))
        rank.exit(1)

    def on_rank_exit(self, rank: SimRank) -> None:
        """Let the other ranks notice the exit, and end srun after the last exit."""
        if not self.is_leaving and not self.is_standby and not self.is_check:
            for other in self.ranks:
                if other.is_alive and not other.is_hung:
                    lose = lambda other=other: self.fail(other, "RuntimeError", "Connection closed by peer")  # noqa: E731
                    self.later(1.0, 6.0, lose)
        self._check_end()

    def _check_end(self) -> None:
        slurm = self.world.slurm
        if any(rank.is_alive for rank in self.ranks) or self.report_is_lost:
            return
        if any(rank.host in slurm.unresponsive for rank in self.ranks):
            return  # srun waits for the dead node.
        self.later(0.5, 1.5, lambda: self.popen.finish(0 if self.is_leaving or self.is_check else 1))

    def node_died(self, node: str) -> None:
        for rank in self.ranks:
            if rank.host == node and rank.is_alive:
                rank.is_alive = False
                if self.server is not None:
                    self.server.disconnect(self.attempt, rank.rank)
                self.on_rank_exit(rank)
        if self.popen.owner is not None and self.popen.owner.host == node:
            self.popen.finish(-signal.SIGKILL)

    # -- signals

    def signal(self, number: int) -> None:
        self.later(0.0, 0.5, lambda: self._receive(number))

    def _receive(self, number: int) -> None:
        for rank in self.ranks:
            if number == signal.SIGKILL:
                rank.exit(None, number)
            elif number in (signal.SIGTERM, signal.SIGUSR2) and self.is_standby:
                rank.exit(None, signal.SIGTERM)
        if number in (signal.SIGTERM, signal.SIGUSR2) and self.stop_signal is None:
            self.stop_signal = number
            if self.world.config.agrees_through_supervisor and self.server is not None:
                for rank in self.ranks:
                    if rank.is_alive and not rank.is_hung:
                        self.server.receive(self.attempt, rank.rank, {"stop": True})

    def signal_srun(self, number: int) -> None:
        """Signal srun: on SIGTERM it kills the step, on SIGKILL it leaves the tasks alone."""
        if self.popen.returncode is not None:
            return
        if number == signal.SIGKILL:
            self.popen.finish(-number)
            return

        def end() -> None:
            self.is_aborted = True
            for rank in self.ranks:
                rank.exit(None, signal.SIGKILL)
            if not any(rank.host in self.world.slurm.unresponsive for rank in self.ranks):
                self.later(0.1, 0.5, lambda: self.popen.finish(137))

        self.later(0.1, 1.0, end)

    def srun_killed(self) -> None:
        self.popen.finish(-signal.SIGKILL)

    # -- messages of the supervisor

    def on_supervisor_message(self, rank: SimRank, message: Mapping[str, Any]) -> None:
        if not rank.is_alive or rank.is_silent:
            return
        if "go" in message and self.is_standby:
            if rank is self.ranks[-1]:
                self.is_standby = False
                self.scheduler.trace("standby activated", self.name)
                self.world.on_attempt_start(self)
                for host in self.hosts:
                    self.world.kill_orphans(host, self.attempt)
                self._load()
            return
        assert self.server is not None
        if "tell" in message:
            place = "wait (train.py:1)" if not rank.is_hung else "step (train.py:2)"
            told = {"phase": self.phase, "step": self.steps_done, "place": place, "waits": not rank.is_hung}
            self.server.receive(self.attempt, rank.rank, {"told": told})
            self.server.receive(self.attempt, rank.rank, {"written": True})
        elif rank.is_hung:
            return
        elif "prepare_stop" in message:
            if self.stop_signal is None:
                self.stop_signal = signal.SIGTERM
            step = self.steps_done + self.scheduler.random.choice((0, 1))
            self.can_stop_after = max(self.can_stop_after, step)
            self.server.receive(self.attempt, rank.rank, {"can_stop_after": step})
        elif "stop_after" in message:
            self.stop_after = message["stop_after"]
            self.world.on_agreed_stop(self)


class HeartbeatServer:
    """Replacement for the server of the same name: messages in virtual time, without sockets."""

    def __init__(self, address: str, handler: Any) -> None:
        self._handler = handler
        self._scheduler = Scheduler.current
        self.world: World = self._scheduler.world
        self._address = f"{address}:{len(self.world.servers)}"
        self.process = self._scheduler.process
        self.world.servers[self._address] = self
        self._inbox = system.SimpleQueue()
        self._connections: dict[tuple[int, int], SimRank] = {}
        self._thread = system.Thread(target=self._serve, name="lines", daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        return {SUPERVISOR_ADDRESS_VARIABLE: self._address}

    @property
    def _is_open(self) -> bool:
        assert self.process is not None
        return not self.process.killed and self._address in self.world.servers

    def __enter__(self) -> HeartbeatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(None)
        self.on_process_end()
        self._thread.join()

    def on_process_end(self) -> None:
        """Let standby workers notice that the supervisor is gone."""
        self.world.servers.pop(self._address, None)
        for rank in self._connections.values():
            if rank.step.is_standby:
                rank.step.later(0.1, 1.0, lambda rank=rank: rank.exit(0))

    def send(self, attempt: int, message: Mapping[str, Any]) -> int:
        self._scheduler.step()
        ranks = [rank for (of, _), rank in self._connections.items() if of == attempt]
        for rank in ranks:
            rank.step.later(0.01, 0.3, lambda rank=rank: rank.step.on_supervisor_message(rank, message))
        return len(ranks)

    def num_connected(self, attempt: int) -> int:
        return sum(of == attempt for of, _ in self._connections)

    def connect(self, attempt: int, rank: SimRank) -> None:
        if self._is_open:
            self._connections[attempt, rank.rank] = rank

    def disconnect(self, attempt: int, rank: int) -> None:
        if self._is_open and self._connections.pop((attempt, rank), None) is not None:
            self._put(("disconnect", attempt, rank))

    def receive(self, attempt: int, rank: int, message: Mapping[str, Any]) -> None:
        """Receive a message of a rank, possibly late."""
        late = self.world.slurm.has("late")
        delay = self._scheduler.random.choice((0.0, 15.0, 40.0)) if late else 0.05
        self._scheduler.call_later(delay, lambda: self._put((message, attempt, rank)))

    def _put(self, item: Any) -> None:
        if self._is_open:
            assert self.process is not None
            with self._scheduler.acting(self.process):
                self._inbox.put(item)

    def _serve(self) -> None:
        next_tick = system.monotonic() + TICK_S
        while True:
            item: Any = ()
            with suppress(system.Empty):
                item = self._inbox.get(timeout=max(0.0, next_tick - system.monotonic()))
            if item is None:
                return
            begun = system.monotonic()
            with suppress(Exception):  # The real server logs it.
                if not item:
                    next_tick = begun + TICK_S
                    self._tick()
                elif item[0] == "disconnect":
                    self._handler.on_disconnect(*item[1:])
                else:
                    self._handler.on_message(*item[1:], item[0])
            self.world.on_messages_handled(system.monotonic() - begun)

    def _tick(self) -> None:
        if not self.world.slurm.has("late"):
            for (attempt, number), rank in list(self._connections.items()):
                if rank.is_alive and not rank.is_silent and not rank.step.is_standby:
                    self._handler.on_message(attempt, number, rank.heartbeat())
        self._handler.on_tick()
