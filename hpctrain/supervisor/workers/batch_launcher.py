"""Run an adopted batch script on the first node, as Slurm would, and control the job steps that it starts."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hpctrain import system
from hpctrain.cluster import expand_hostlist
from hpctrain.cluster.processes import child_pids, stat_fields
from hpctrain.errors import SchedulerError
from hpctrain.files import write_atomic
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.launcher import observing_variables
from hpctrain.rundir import (
    ATTEMPT_VARIABLE,
    CHILD_VARIABLE,
    LIFELINE_VARIABLE,
    PREDECESSOR_VARIABLE,
    RunDir,
)
from hpctrain.slurm.batch_header import SHELLS
from hpctrain.slurm.command import list_steps
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.job_queries import query_job, query_seconds_left
from hpctrain.slurm.job_requests import kill_steps, signal_steps
from hpctrain.supervisor.job_control import EARLY_SIGNAL_TOLERANCE_S
from hpctrain.supervisor.launch.job_step import EmitEvent, SignalReceived
from hpctrain.supervisor.launch.step_launchers import LocalStep, address_of_this_host, local_array_variables
from hpctrain.supervisor.workers.observed_groups import NOTHING_SURVIVED, ObservedGroups

#: The folders with hpctrain and its dependencies, for Python environments without them.
_PACKAGES = [str(Path(__file__).parents[3]), str(Path(msgspec.__file__).parents[1])]
#: Seconds between two checks for ranks that are stopping.
_POLL_S = 0.1
#: Seconds to end the job steps: with a last try, less than the supervisor waits for the end of a killed step.
_KILL_LIMIT_S = 25.0
#: Seconds for a query at the end of a script. With the kill, less than the supervisor waits for its end.
_QUERY_LIMIT_S = 5.0
#: Seconds between two queries for a preemption, each an RPC to the controller.
_PREEMPTION_INTERVAL_S = 10.0
#: Seconds for srun or torchrun to write the last output of its ranks, and to exit.
_LAUNCHERS_END_S = 10.0
#: Seconds after which a suspended script may read the output of ranks that have not ended.
_READS_AFTER_S = 5.0
#: Seconds to receive the last messages of ranks that have ended before the script.
_LAST_MESSAGES_S = 1.0
#: A signal that only the batch script receives (sbatch(1), --signal).
_BATCH_SIGNAL = re.compile(r"R?BR?:(?:SIG)?(\w+)(?:@\d+)?", re.ASCII | re.IGNORECASE)


def spec_of_allocation(spec: JobSpec, environ: Mapping[str, str]) -> JobSpec:
    """Return the specification of a batch script that uses the whole allocation."""
    nodes = len(_hosts(spec, environ))
    return replace(spec, nodes=nodes, min_nodes=nodes, node_check="never", standby_workers_s=None)


def batch_signal(spec: JobSpec) -> signal.Signals | None:
    """Return the signal that the user requests for the batch script."""
    if match := _BATCH_SIGNAL.fullmatch(spec.directives.get("signal", "")):
        name = match[1].upper()
        with suppress(ValueError, KeyError):
            return signal.Signals(int(name)) if name.isdecimal() else signal.Signals[f"SIG{name}"]
    return None


def link_output(log: Path, fd: int) -> None:
    """Let a log of the run show the file to which the user's job writes."""
    with suppress(OSError):
        target = os.path.realpath(f"/proc/self/fd/{fd}")
        if os.path.isfile(target) and not (log.exists() and os.path.samefile(log, target)):
            log.unlink(missing_ok=True)
            log.symlink_to(target)


def link_rank_log(run: RunDir, attempt: int) -> None:
    """Let the log of the script show its output, and record the length before it; see `output_range`."""
    with suppress(OSError):
        # Before the link, which readers look for.
        run.write(run.log_index(attempt, 0), _length_record(0, os.fstat(1).st_size))
    link_output(run.rank_log(attempt, 0), 1)


def link_own_log(run: RunDir, attempt: int, number: int, rank: int, path: str, length: int) -> None:
    """Let a log of the run show a file to which only some ranks of the script write."""
    with suppress(OSError):
        if length:
            write_atomic(run.log_index(attempt, number), _length_record(number, length), durable=False)
        run.own_log(attempt, rank, number).symlink_to(path)


def _length_record(number: int, length: int) -> str:
    return json.dumps({"time": round(system.time(), 2), "rank": number, "bytes": length}) + "\n"


class BatchLauncher:
    """Starts the batch script of the run."""

    groups: ObservedGroups
    """Receiver of the heartbeats of the next step."""

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self.hosts = _hosts(spec, environ)
        self.spares: list[str] = []
        self.address = address_of_this_host(self.hosts)
        self._spec, self._environ = spec, environ

    def start(self, command: list[str], variables: Mapping[str, str], emit: EmitEvent) -> BatchStep:
        spec, attempt = self._spec, int(variables[ATTEMPT_VARIABLE])
        link_rank_log(RunDir(Path(spec.run_dir)), attempt)
        run_variables = {name: value for name, value in variables.items() if name.startswith("HPCTRAIN_")}
        environ = {**self._environ, **spec.env, **run_variables}
        names = [*run_variables, CHILD_VARIABLE]
        facts: dict[str, object] = {"packages": _PACKAGES, "variables": [*names, LIFELINE_VARIABLE]}
        facts["python"] = platform.python_version()
        facts |= {"job": environ.get("SLURM_JOB_ID"), "step": environ.get("SLURM_STEP_ID")}
        # With the PYTHONPATH of --env, if any.
        environ |= observing_variables(facts, environ)
        if (exported := environ.get("SLURM_EXPORT_ENV", "ALL")).partition(",")[0].upper() != "ALL":
            # From --export of the script. srun would start processes that are not observed.
            chosen = () if exported.upper() == "NONE" else (exported,)
            environ["SLURM_EXPORT_ENV"] = ",".join((*chosen, *names, "PYTHONPATH"))
        if spec.backend == "local" and spec.array_task is not None:
            environ |= local_array_variables(spec.array_task)
        if "open-mode" not in spec.directives:
            environ.pop("SLURM_OPEN_MODE", None)  # from hpctrain's own directive
        if attempt:
            # Scripts detect a restart by this variable.
            environ["SLURM_RESTART_COUNT"] = str(max(attempt, int(environ.get("SLURM_RESTART_COUNT", "0"))))
        if environ.pop(PREDECESSOR_VARIABLE, None) is not None:
            environ["SLURM_SUBMIT_DIR"] = spec.workdir
        return BatchStep(spec, command, environ, emit, self.groups)


class BatchStep(LocalStep):
    """The process of the batch script, and the job steps that it has started."""

    def __init__(
        self,
        spec: JobSpec,
        command: list[str],
        environ: Mapping[str, str],
        emit: EmitEvent,
        groups: ObservedGroups,
    ) -> None:
        self._groups = groups
        self.survival = NOTHING_SURVIVED
        self._is_stopping = self._is_suspended = False
        self._suspension = system.Lock()
        self._ended = system.Event()
        self._job_id = own_job_id(environ) if spec.backend == "slurm" else None
        self._outer, self._batch_signal = strip_job_env(environ), batch_signal(spec)
        #: Seconds before the time limit from which Slurm may have signalled the job steps.
        self._limit_lead_s = -1.0
        if "signal" in spec.directives and self._batch_signal is None:
            self._limit_lead_s = spec.stop_before_limit_s + EARLY_SIGNAL_TOLERANCE_S
        super().__init__(command, spec.workdir, [dict(environ)], emit)
        system.Thread(target=self._watch_preemption, args=(emit,), daemon=True).start()

    def signal(self, number: signal.Signals) -> None:
        """Forward a signal for the batch script; ask the ranks to stop for others."""
        if number == signal.SIGKILL:
            super().signal(number)  # The job steps follow in `_end`.
        elif number == signal.SIGQUIT:
            if self._job_id is not None and (steps := list_steps(self._job_id, self._outer)):
                signal_steps(steps, number, self._outer)
        elif number == self._batch_signal:
            self._signal_script(number)
        else:
            with self._suspension:
                is_first, self._is_stopping = not self._is_stopping, True
                is_observed = self._groups.has_ranks() or self._is_suspended
                is_suspended = is_observed and is_first and self._suspend()
            self._groups.stop(number)
            if is_suspended:
                system.Thread(target=self._end_script, daemon=True).start()
            if not is_observed:
                super().signal(signal.SIGTERM)

    def _signal_script(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError, PermissionError):
            if self._processes[0].returncode is None:
                os.kill(self._processes[0].pid, number)

    def _suspend(self) -> bool:
        """Keep the script from running its next lines. A shell may have been replaced: `exec srun`."""
        with suppress(OSError):
            command = Path(f"/proc/{self._processes[0].pid}/comm").read_text(errors="replace").strip()
            if command in SHELLS:
                self._is_suspended = True
                self._signal_script(signal.SIGSTOP)
        return self._is_suspended

    def _resume(self) -> None:
        self._is_suspended = False
        self._signal_script(signal.SIGCONT)

    def _end_script(self) -> None:
        """End the suspended script after its ranks: its next lines expect a complete training."""
        started = system.monotonic()
        while self._groups.has_ranks() and not self._ended.wait(_POLL_S):
            if system.monotonic() - started > _READS_AFTER_S:
                # The ranks may wait for the script to read their output.
                self._signal_script(signal.SIGCONT)
                system.sleep(_POLL_S / 2)
                self._signal_script(signal.SIGSTOP)
        deadline = system.monotonic() + _LAUNCHERS_END_S
        while self._has_running_child() and system.monotonic() < deadline and not self._ended.wait(_POLL_S):
            pass
        self._signal_script(signal.SIGTERM)
        self._resume()

    def _has_running_child(self) -> bool:
        for pid in child_pids(self._processes[0].pid):
            with suppress(OSError):
                if stat_fields(pid)[0] != "Z":
                    return True
        return False

    def _watch_preemption(self, emit: EmitEvent) -> None:
        """Report a stop by Slurm of which only the job steps receive a signal, such as a preemption.

        Slurm is queried when a rank asks the others to stop, and regularly if no srun has started some ranks.
        """
        while self._job_id is not None and not self._ended.is_set():
            is_asked = self._groups.ask_to_stop.wait(_PREEMPTION_INTERVAL_S)
            self._groups.ask_to_stop.clear()
            with self._suspension:
                if self._is_stopping or self._ended.is_set():
                    return
                if is_asked:
                    self._suspend()
            is_due = is_asked or self._groups.has_ranks_outside_steps
            if is_due and self._is_stopped_by_slurm(self._job_id, is_asked=is_asked):
                emit(SignalReceived(signal.SIGTERM))
                return
            with self._suspension:
                if is_asked and not self._is_stopping:  # The script itself stops its ranks.
                    self._resume()

    def _is_stopped_by_slurm(self, job_id: str, *, is_asked: bool) -> bool:
        try:
            if query_job(job_id, self._outer).preempted:
                return True
            left_s = query_seconds_left(job_id, self._outer)
        except SchedulerError:
            return is_asked
        return is_asked and left_s is not None and left_s <= self._limit_lead_s

    def _wait_for(self, rank: int) -> None:
        is_stopped = False
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOWAIT)
            is_stopped = ended is not None and ended.si_code == os.CLD_KILLED
        # A stop signal ends a shell immediately, but its ranks train to the common step, or save.
        while (self._is_stopping or is_stopped) and self._groups.has_ranks() and not self._killed:
            system.sleep(_POLL_S)
        deadline = system.monotonic() + _LAST_MESSAGES_S
        while self._groups.has_ranks() and not self._killed and system.monotonic() < deadline:
            system.sleep(_POLL_S)
        self.survival = self._groups.survival()
        super()._wait_for(rank)

    def _end(self) -> None:
        """End the steps in the background, as Slurm does at the end of a batch script; others may follow."""
        for waiter in self._waiters:
            waiter.join()
        self._ended.set()
        self._groups.ask_to_stop.set()
        if self._job_id is not None and not self._is_job_ending(self._job_id):
            kill_steps(self._job_id, self._outer, _KILL_LIMIT_S)
        super()._end()

    def _is_job_ending(self, job_id: str) -> bool:
        """Return true if Slurm ends the job and its steps. Those of a lost node remain listed."""
        with suppress(SchedulerError):
            return query_job(job_id, self._outer, _QUERY_LIMIT_S).is_ending
        return False


def _hosts(spec: JobSpec, environ: Mapping[str, str]) -> list[str]:
    return expand_hostlist(environ["SLURM_JOB_NODELIST"]) if spec.backend == "slurm" else ["local-0"]
