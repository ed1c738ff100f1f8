"""Diagnose an attempt: its kind and cause, from exit codes, failure files and nodes."""

from __future__ import annotations

import logging
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hpctrain import system
from hpctrain.errors import EXIT_CONTINUE, SchedulerError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import END_KINDS, EndKind
from hpctrain.record_types import Corruption, Event, StepRecord, UnfinishedCall, read_record
from hpctrain.records.crash_output import describe_unfinished
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir
from hpctrain.slurm.srun_step import TaskResult
from hpctrain.supervisor.failures.gpu_faults import gpu_faults
from hpctrain.supervisor.failures.root_cause import (
    RankFailure,
    classify,
    collect_failures,
    is_deterministic,
    killed_tasks,
    read_failures,
    root_cause,
)
from hpctrain.supervisor.job_control import EARLY_SIGNAL_TOLERANCE_S, JobControl, known_seconds_left
from hpctrain.supervisor.policy.decide import AttemptEnd, describe_nodes
from hpctrain.supervisor.policy.history import SHORT_ATTEMPT_S, History
from hpctrain.supervisor.policy.job_intent import JobDisposition
from hpctrain.supervisor.workers.attempt_monitor import AttemptOutcome
from hpctrain.supervisor.workers.attempt_runner import AttemptResult
from hpctrain.supervisor.workers.observed_groups import RankLoss

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FailureAnalyzer:
    """Diagnoses attempts, and records the results in the run's record."""

    run: RunDir
    spec: JobSpec
    job_control: JobControl

    def analyze(self, result: AttemptResult, hosts: list[str]) -> AttemptEnd:
        attempt = result.attempt
        if self.spec.program == "batch":
            disposition = self._disposition()
            if self._is_asked_to_stop(result) or disposition is JobDisposition.REQUEUED:
                # Slurm also ends a job because it has lost a node.
                lost = {} if disposition is JobDisposition.STAYS else self._find_lost(hosts)
                return self._record_lost(attempt, lost, hosts) if lost else self._diagnose_stop(result)
            # Only the script has ended ranks, such as a server, or a launcher the peers of a failed rank.
            result.monitor.is_stopping = False
            if result.outcome is AttemptOutcome.DONE and not self._ends_in_failure(result):
                return AttemptEnd(EndKind.DONE, self._describe_hidden_failures(result))
            if result.outcome in (AttemptOutcome.DONE, AttemptOutcome.STOPPED):
                # Many scripts end in a command such as `echo`, whose exit code hides that of the ranks.
                return self._analyze_failure(result, hosts, {})
        early_exits = self._early_exits(result, len(hosts) * self.spec.ntasks_per_node)
        match result.outcome:
            case AttemptOutcome.DONE if not early_exits:
                if (cause := self._describe_missing_steps(attempt)) is None:
                    return AttemptEnd(EndKind.DONE)
                return self._record(attempt, EndKind.UNFINISHED, cause, rank=0, host=hosts[0])
            case AttemptOutcome.DONE if History.from_events(self.run.read_events()).agreed_to_stop:
                return self._diagnose_stop(result)
            case AttemptOutcome.STOPPED:
                return self._diagnose_stop(result)
            case AttemptOutcome.OUT_OF_TIME:
                return AttemptEnd(EndKind.OUT_OF_TIME)
            case AttemptOutcome.NOT_STARTED:
                end = result.monitor.end
                assert end is not None
                cause = f"the job step did not start: srun exited with code {end.returncode}"
                cause += f": {end.stderr_tail}" if end.stderr_tail else ""
                failure = self._record(attempt, EndKind.NOT_STARTED, cause, log_path=str(self.run.slurm_log))
                return replace(failure, lost=self._find_lost(hosts))
            case AttemptOutcome.DONE | AttemptOutcome.FAILED:
                return self._analyze_failure(result, hosts, early_exits)

    def _is_asked_to_stop(self, result: AttemptResult) -> bool:
        """Return true if a batch script was stopped from outside, or asks for a continuation after a save."""
        monitor, attempt = result.monitor, result.attempt
        if not monitor.is_stopping:
            return False
        if monitor.was_signalled or self.run.is_asked_to_requeue(attempt) or self._is_job_ending():
            return True
        if result.outcome is not AttemptOutcome.STOPPED or self._unsurvived(result):
            return False
        return any(
            event.kind == "checkpoint" and event.attempt == attempt for event in self.run.read_events()
        )

    def _is_job_ending(self) -> bool:
        """Return true if Slurm has signalled the job steps, because of a preemption or the time limit."""
        try:
            is_preempted = self.job_control.is_preempted()
        except SchedulerError as error:
            log.warning("cannot determine whether this job is preempted (%s); assuming that it is", error)
            is_preempted = True
        return is_preempted or self._is_near_limit()

    def _ends_in_failure(self, result: AttemptResult) -> bool:
        """Return true if ranks of a batch script failed, and the script did not survive it."""
        if self._unsurvived(result):
            return True
        return not result.survival.until and any(killed_tasks(self.run.slurm_log, result.job_log_offset))

    def _unsurvived(self, result: AttemptResult) -> list[RankLoss | RankFailure]:
        """Return the failures of ranks that a batch script has not survived."""
        failures: list[RankLoss | RankFailure] = [*read_failures(self.run, result.attempt)]
        failures += result.survival.losses
        return [failure for failure in failures if not result.survival.covers(failure)]

    def _describe_hidden_failures(self, result: AttemptResult) -> str | None:
        """Return a remark on failures of ranks that a batch script has not reported by its exit code."""
        failures = [*read_failures(self.run, result.attempt)]
        if all(failure.is_peer_lost for failure in failures):
            losses = result.survival.losses
            failures += killed_tasks(self.run.slurm_log, result.job_log_offset, losses)
        if not failures:
            return None
        count = f" ({len(failures)} ranks failed)" if len(failures) > 1 else ""
        return f"{root_cause(failures)}{count}, but the batch script exited with code 0"

    def _disposition(self) -> JobDisposition:
        """Return Slurm's plan for the job. The script may have requeued it itself."""
        try:
            return self.job_control.disposition()
        except SchedulerError:
            return JobDisposition.STAYS

    def record_supervisor_death(self, attempt: int) -> AttemptEnd:
        cause, log_path = "the supervisor was killed", str(self.run.supervisor_log)
        return self._record(attempt, EndKind.KILLED, cause, log_path=log_path)

    def recorded_stop(self, attempt: int) -> EndKind | None:
        """Return the kind of stop recorded by the attempt's requeue event; None without one."""
        for event in read_last_records(self.run.events, Event):
            if event.attempt != attempt or event.kind == "started":
                break
            if event.kind == "requeue" and event.end_kind in set(EndKind):
                kind = EndKind(event.end_kind)
                return kind if kind.is_stop else None
        return None

    def record_bad_nodes(self, attempt: int, bad: Mapping[str, str], hosts: list[str]) -> AttemptEnd:
        for host, trouble in bad.items():
            rank = hosts.index(host) * self.spec.ntasks_per_node
            cause, log_path = f"node check: {host}: {trouble}", str(self.run.node_check_result(attempt, rank))
            self._record(attempt, EndKind.NODE_CHECK, cause, rank=rank, host=host, log_path=log_path)
        return AttemptEnd(EndKind.NODE_CHECK, f"node check: {describe_nodes(bad)}")

    def stop_kind(self, attempt: int) -> EndKind:
        """Return the request that stopped the ranks; without `Trainer`, ranks report no signal."""
        if self.run.is_asked_to_requeue(attempt):
            return EndKind.REQUESTED
        for event in read_last_records(self.run.events, Event):
            if event.kind == "signal" and event.attempt == attempt:
                return EndKind.TIME_LIMIT if event.signal == signal.SIGUSR2.name else EndKind.PREEMPTED
            if event.kind == "started":
                break
        return EndKind.TIME_LIMIT if self._is_near_limit() else EndKind.PREEMPTED

    def _is_near_limit(self) -> bool:
        left_s = known_seconds_left(self.job_control)
        return left_s is not None and left_s <= self.spec.stop_before_limit_s + EARLY_SIGNAL_TOLERANCE_S

    def _diagnose_stop(self, result: AttemptResult) -> AttemptEnd:
        if draining := result.monitor.draining:
            return AttemptEnd(EndKind.NODE_DRAIN, describe_nodes(draining), lost=draining)
        return AttemptEnd(self.stop_kind(result.attempt))

    def _early_exits(self, result: AttemptResult, world_size: int) -> dict[int, str]:
        """Return and delete the reports of ranks that exited with code 0 during training."""
        per_task = self.spec.ntasks_per_node // self.spec.processes_per_node
        done = {task.rank for task in result.monitor.exits if task.result is TaskResult.DONE}
        newest = self._newest_metrics()
        trained = newest.step if newest is not None and newest.attempt == result.attempt else None
        early_exits = {}
        for path in self.run.unfinished_files(result.attempt):
            rank = int(path.name.split("-")[3])
            if rank < world_size and (result.outcome is AttemptOutcome.DONE or rank // per_task in done):
                unfinished = UnfinishedCall()
                with suppress(OSError, ValueError):  # The file was written to a full disk.
                    unfinished = read_record(path, UnfinishedCall)
                early_exits[rank] = describe_unfinished(unfinished.call, trained, unfinished.last_step)
            with suppress(OSError):
                path.unlink()
        return early_exits

    def _newest_metrics(self) -> StepRecord | None:
        try:
            return next(read_last_records(self.run.metrics, StepRecord), None)
        except OSError:
            return None

    def _describe_missing_steps(self, attempt: int) -> str | None:
        """Return the cause if the steps of a failed attempt are lost, but this attempt trained none.

        After a checkpoint of the last step, or of an unknown step, training may be complete.
        """
        newest = self._newest_metrics()
        if newest is None or newest.attempt == attempt or not newest.step:
            return None
        trained, step = newest.attempt, newest.step
        failure = None
        for event in self.run.read_events():
            kind, by = event.kind, event.attempt
            # Ranks without a step log, such as those of a command, only report their first step.
            has_trained = kind in ("resumed", "startup") and by == attempt
            is_saved = kind == "checkpoint" and by >= trained and (event.step or step) >= step
            if has_trained or is_saved:
                return None
            if event.is_new_submission:
                failure = None
            elif kind == "failure" and by == trained and event.rank is not None:
                failure = event
        if failure is None:
            return None
        command = f"hpctrain resume {shlex.quote(self.spec.run_dir)}"
        return (
            f"attempt {trained} failed after step {step} ({failure.cause}), attempt {attempt} trained "
            "no step and exited with code 0, and no checkpoint of the run contains the steps. If the script "
            "had finished and saved its result elsewhere, nothing is lost. Otherwise, change the script to "
            f"continue from its earlier output, or to overwrite it, then resume the run: {command}"
        )

    def _analyze_failure(
        self, result: AttemptResult, hosts: list[str], early_exits: Mapping[int, str]
    ) -> AttemptEnd:
        """Diagnose failed ranks. Ranks that only lost stopped peers count as stopped."""
        attempt, monitor = result.attempt, result.monitor
        lost = self._find_lost(hosts)
        # A rank of a batch script that has failed lets the others wait.
        has_failed = self.spec.program == "batch" and any(
            isinstance(failure, RankFailure) and not failure.is_peer_lost
            for failure in self._unsurvived(result)
        )
        if (hang := monitor.hang) is not None and not (lost or monitor.is_stopping or has_failed):
            return self._record(attempt, EndKind.HANG, hang.cause, rank=hang.rank, host=hang.host)
        failures = collect_failures(
            self.run,
            self.spec,
            attempt,
            monitor.exits,
            hosts,
            result.job_log_offset,
            early_exits,
            survival=result.survival,
        )
        if lost:
            # The loss of the node explains all reports of the ranks.
            return self._record_lost(attempt, lost, hosts, failed_ranks=len(failures))
        if not failures and monitor.is_stopping:
            return self._diagnose_stop(result)
        if not failures and result.outcome is AttemptOutcome.STOPPED:
            cause = (
                f"the batch script exited with code {EXIT_CONTINUE}, which requests a continuation, although "
                "nothing stopped the run, and the attempt saved no checkpoint. If the script saves any, name "
                "them with --checkpoints"
            )
            return self._record(attempt, EndKind.PYTHON, cause, rank=0, host=hosts[0])
        if not failures:
            return self._record(attempt, EndKind.KILLED, "the job step failed, but no rank reported a cause")
        failure = root_cause(failures)
        exits = () if self.spec.program == "batch" else monitor.exits
        told_to_leave = any(task.result is TaskResult.CONTINUE for task in exits)
        if told_to_leave and failure.is_peer_lost:
            return self._diagnose_stop(result)
        if failure.corruption is not None:
            return self._record_corruption(attempt, failure, failure.corruption, hosts)
        kind = classify(failure, has_xid=bool(gpu_faults(self.run, [failure.host], result.started_at)))
        if monitor.is_stopping and (END_KINDS[kind].may_follow_stop or failure.kind == "exit"):
            log.info("after the stop request, %s: this is part of the stop", failure)
            return self._diagnose_stop(result)
        # A rank whose peers have stopped may fail with a subsequent error.
        if kind is EndKind.PYTHON and not told_to_leave and self._is_user_error(result, failure):
            kind = EndKind.USER_ERROR
        cause = str(failure)
        if kind is EndKind.DISK_FULL:
            command = f"hpctrain resume {shlex.quote(self.spec.run_dir)}"
            cause = f"{cause.rstrip('.')}. Free up disk space, then resume the run: {command}"
        size = failure.micro_batch_size if kind is EndKind.GPU_OOM else None
        fields: dict[str, Any] = {"log_path": failure.log, "failed_ranks": len(failures)}
        fields |= {"micro_batch_size": size} if size else {}
        end = self._record(attempt, kind, cause, rank=failure.rank, host=failure.host or None, **fields)
        return replace(end, micro_batch_size=size)

    def _record_lost(
        self, attempt: int, lost: Mapping[str, str], hosts: list[str], **fields: Any
    ) -> AttemptEnd:
        host, cause = next(iter(lost)), f"node lost: {describe_nodes(lost)}"
        rank = hosts.index(host) * self.spec.ntasks_per_node
        if self.spec.program == "batch":  # whose ranks on the node are unknown
            fields["log_path"] = str(self.run.rank_log(attempt, 0))
        end = self._record(attempt, EndKind.NODE_LOST, cause, rank=rank, host=host, **fields)
        return replace(end, lost=lost)

    def _record_corruption(
        self, attempt: int, failure: RankFailure, corruption: Corruption, hosts: list[str]
    ) -> AttemptEnd:
        """Record wrong results as a failure of the suspected rank; without a majority, of no node."""
        suspects, per_node = dict(corruption.suspects), self.spec.ntasks_per_node
        nodes = {hosts[rank // per_node] for rank in suspects if rank in range(len(hosts) * per_node)}
        fields: dict[str, Any] = {"log_path": failure.log, "verified_step": corruption.verified_step}
        fields["host"] = nodes.pop() if len(nodes) == 1 else None
        fields["device"] = next(iter(suspects.values())) if len(suspects) == 1 else None
        return self._record(attempt, EndKind.CORRUPTION, failure.message, rank=min(suspects), **fields)

    def _is_user_error(self, result: AttemptResult, failure: RankFailure) -> bool:
        """Return true if the next attempt would fail in the same way, and there is no checkpoint."""
        if failure.final or self.run.function.exists():
            return failure.final
        if not is_deterministic(failure) or system.time() - result.started_at > SHORT_ATTEMPT_S:
            return False
        saved = any(event.kind in ("checkpoint", "resumed") for event in self.run.read_events())
        newest = self._newest_metrics()
        return not saved and (newest is None or newest.step <= 1)

    def _find_lost(self, hosts: list[str]) -> dict[str, str]:
        if len(hosts) == 1 or self.job_control.nodes is None:
            return {}
        try:
            return self.job_control.nodes.lost(hosts)
        except SchedulerError as error:
            log.warning("cannot determine whether a node was lost (%s); assuming that none was", error)
            return {}

    def _record(
        self,
        attempt: int,
        kind: EndKind,
        cause: str,
        *,
        rank: int = -1,
        host: str | None = None,
        log_path: str | None = None,
        **fields: int | str | None,
    ) -> AttemptEnd:
        """Record a failure; by default, with the log of the rank."""
        if log_path is None and rank >= 0:
            find = self.run.log_of if self.spec.program == "batch" else self.run.rank_log
            log_path = str(find(attempt, rank))
        facts = {"rank": rank, "host": host, "cause": cause, "log": log_path, **fields, "class": kind}
        self.run.log_event("failure", attempt, **facts)
        hint = f" (log: {log_path})" if log_path else ""
        log.error("attempt %d failed (%s): %s%s", attempt, kind, cause, hint)
        return AttemptEnd(kind, cause)
