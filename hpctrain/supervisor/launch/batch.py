"""Run an adopted batch script on the first node, as Slurm would, and control the job steps that it starts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import Signals

import msgspec

from hpctrain import system
from hpctrain.cluster import expand_hostlist
from hpctrain.errors import SchedulerError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.launcher import observing_variables
from hpctrain.rundir import ATTEMPT_VARIABLE, PREDECESSOR_VARIABLE, RunDir
from hpctrain.slurm.command import list_steps
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.job_requests import signal_steps
from hpctrain.supervisor.launch.job_step import EmitEvent
from hpctrain.supervisor.launch.step_launchers import LocalStep, address_of_this_host

#: The folders with hpctrain and its dependencies, for Python environments without them.
_PACKAGES = [str(Path(__file__).parents[3]), str(Path(msgspec.__file__).parents[1])]
#: Seconds between two checks for ranks that are stopping.
_POLL_S = 0.1
#: A signal that only the batch script receives (sbatch(1), --signal).
_BATCH_SIGNAL = re.compile(r"R?BR?:(?:SIG)?(\w+)(?:@\d+)?", re.ASCII | re.IGNORECASE)

_StopRanks = Callable[[signal.Signals], object]


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


class BatchLauncher:
    """Starts the batch script of the run."""

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self.hosts = _hosts(spec, environ)
        self.spares: list[str] = []
        in_slurm = spec.backend == "slurm"
        self.address = address_of_this_host(self.hosts) if in_slurm else "127.0.0.1"
        self._spec, self._environ = spec, environ

    def start(
        self,
        command: list[str],
        variables: Mapping[str, str],
        emit: EmitEvent,
        *,
        beside: bool = False,  # noqa: ARG002
    ) -> BatchStep:
        spec, attempt = self._spec, int(variables[ATTEMPT_VARIABLE])
        link_output(RunDir(Path(spec.run_dir)).rank_log(attempt, 0), 1)
        environ = {
            **self._environ,
            **spec.env,
            **{name: value for name, value in variables.items() if name.startswith("HPCTRAIN_")},
        }
        # With the PYTHONPATH of --env, if any.
        environ |= observing_variables({"packages": _PACKAGES, "job": environ.get("SLURM_JOB_ID")}, environ)
        if "open-mode" not in spec.directives:
            environ.pop("SLURM_OPEN_MODE", None)  # from hpctrain's own directive
        if attempt:
            # Scripts detect a restart by this variable.
            environ["SLURM_RESTART_COUNT"] = str(max(attempt, int(environ.get("SLURM_RESTART_COUNT", "0"))))
        if environ.pop(PREDECESSOR_VARIABLE, None) is not None:
            environ["SLURM_SUBMIT_DIR"] = spec.workdir
        return BatchStep(spec, command, environ, emit)


class BatchStep(LocalStep):
    """The process of the batch script, and the job steps that it has started."""

    def __init__(
        self, spec: JobSpec, command: list[str], environ: Mapping[str, str], emit: EmitEvent
    ) -> None:
        #: Ask the observed ranks to stop; and return true if some have not exited yet.
        self.stop_ranks: _StopRanks = bool
        self.has_ranks: Callable[[], bool] = bool
        self._is_stopping = False
        self._job_id = own_job_id(environ) if spec.backend == "slurm" else None
        self._outer, self._batch_signal = strip_job_env(environ), batch_signal(spec)
        super().__init__(command, spec.workdir, [dict(environ)], emit)

    def signal(self, number: signal.Signals) -> None:
        """Forward a signal for the batch script; ask the ranks to stop for others."""
        if number in (signal.SIGKILL, signal.SIGQUIT):
            if number == signal.SIGKILL:
                super().signal(number)
            self._signal_steps(number)
        elif number == self._batch_signal:
            with suppress(ProcessLookupError):
                os.kill(self._processes[0].pid, number)
        else:
            self._is_stopping = True
            self.stop_ranks(number)
            if not self.has_ranks():  # The script and its programs are not observed.
                super().signal(signal.SIGTERM)

    def _signal_steps(self, number: Signals) -> None:
        if self._job_id is not None and (steps := list_steps(self._job_id, self._outer)):
            try:
                signal_steps(steps, number, self._outer)
            except SchedulerError:
                # Slurm reports an error for steps that have ended since.
                if not set(steps).isdisjoint(list_steps(self._job_id, self._outer)):
                    raise

    def kill(self) -> None:
        try:
            super().kill()
        except SchedulerError as error:
            print(f"hpctrain: cannot kill the job steps of the batch script: {error}", flush=True)

    def _wait_for(self, rank: int) -> None:
        is_stopped = False
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOWAIT)
            is_stopped = ended is not None and ended.si_code == os.CLD_KILLED
        # A stop signal ends a shell immediately, but its ranks train to the common step, or save.
        while (self._is_stopping or is_stopped) and self.has_ranks() and not self._killed:
            system.sleep(_POLL_S)
        super()._wait_for(rank)

    def _end(self) -> None:
        """End the steps in the background, as Slurm does at the end of a batch script."""
        for waiter in self._waiters:
            waiter.join()
        with suppress(SchedulerError):
            self._signal_steps(signal.SIGKILL)
        super()._end()


def _hosts(spec: JobSpec, environ: Mapping[str, str]) -> list[str]:
    return expand_hostlist(environ["SLURM_JOB_NODELIST"]) if spec.backend == "slurm" else ["local-0"]
