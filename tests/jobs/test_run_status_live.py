"""Run states on a real Slurm, polled continuously while jobs change."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.accounting_slurm import AccountingSandbox
from helpers.commands import environment, run_command
from helpers.waiting import deadline_in, scaled, wait_for

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.runs.run import Run, query_statuses
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.jobs.submit.complete_options import resolve_dependency
from hpctrain.rundir import RunDir
from hpctrain.sandbox import Sandbox
from hpctrain.slurm.states import JobRecord, RunState

#: A function for scripts: it records the run's end, as a supervisor does, after the submission's event.
_END = """
finish() {
    until [ -s events.jsonl ]; do sleep 0.05; done
    printf '{"time": %s, "attempt": 0, "kind": "finished", "state": "%s"}\\n' $(date +%s) $1 >>events.jsonl
}
"""


@dataclass(frozen=True)
class SlurmJobs:
    box: Sandbox
    environ: Mapping[str, str]

    def command(self, *argv: str) -> str:
        return run_command(argv, self.environ).stdout.strip()

    def sbatch(self, folder: Path, script: str, *options: str) -> str:
        """Submit a script that runs in `folder`; return the job's id."""
        folder.mkdir(exist_ok=True)
        path = folder / "job.sbatch"
        path.write_text(f"#!/bin/bash\n{_END}\n{script}\n")
        options_of_folder = (f"--chdir={folder}", "--output=slurm.log", "--open-mode=append")
        return self.command("sbatch", "--parsable", *options_of_folder, *options, str(path))

    def submit(self, folder: Path, script: str, *options: str) -> Run:
        job_id = self.sbatch(folder, script, *options)
        return self.record(folder, job_id)

    def record(self, folder: Path, job_id: str) -> Run:
        folder.mkdir(exist_ok=True)
        run = RunDir(folder)
        run.log_event("submitted", 0, job_id=job_id, backend="slurm")
        return Run(run, self.environ)


#: The expected run state by job state. A run that is complete or was cancelled records it itself.
_MEANING = {
    "PENDING": "PENDING",
    "CONFIGURING": "RUNNING",
    "RUNNING": "RUNNING",
    "COMPLETING": "RUNNING",
    "COMPLETED": "FAILED",
    "CANCELLED": "CANCELLED",
    "FAILED": "FAILED",
    "NODE_FAIL": "FAILED",
    "OUT_OF_MEMORY": "FAILED",
    "TIMEOUT": "FAILED",
}


class JobStates:
    def __init__(self, environ: Mapping[str, str]) -> None:
        fields = "--Format=JobArrayID:60,State:20,RestartCnt:10"
        command = ["squeue", "--noheader", "--all", "--states=all", "--array", fields]
        self._jobs: dict[str, set[tuple[str, str]]] = {}
        for line in run_command(command, environ).stdout.splitlines():
            name, state, restarts = line.split()
            self._jobs.setdefault(name.partition("+")[0], set()).add((state, restarts))

    def of(self, job_id: str) -> set[tuple[str, str]]:
        """Return state and number of restarts of the job, or of its components."""
        array, _, task = job_id.partition("_")
        is_known = any(name.startswith(f"{array}_") for name in self._jobs)
        if task and is_known and job_id not in self._jobs:
            return {("CANCELLED", "0")}  # It was removed from the pending tasks.
        return self._jobs.get(job_id, set())


def check_status(status: RunStatus, before: JobStates, after: JobStates, run: Run) -> bool:
    """Check a status against the controller's states before and after it; return True if that was possible.

    It is impossible while the job is changing, and after the run has recorded its end.
    """
    assert status.job_id is not None
    states = before.of(status.job_id)
    if len(states) != 1 or states != after.of(status.job_id):
        return False
    if any(event.kind == "finished" for event in run.dir.read_events()):
        return False
    ((state, restarts),) = states
    expected = _MEANING[state]
    if run.dir.cancel_request.exists() and RunState(expected).ended:
        expected = "CANCELLED"
    assert status.state == expected, f"squeue says {state} (restart {restarts}) of {status}"
    return True


pytestmark = pytest.mark.slurm

#: Conditions that a scenario waits for, one after the other.
Steps = Iterator[str | Callable[[], bool]]


@pytest.fixture(params=["slurm", "accounting"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmJobs]:
    """A cluster with or without accounting; a failed test leaves no jobs to the next one."""
    box = request.getfixturevalue(request.param)
    cluster = SlurmJobs(box, environment(box.env))
    yield cluster
    cluster.command("scancel", "--user=root", "--quiet")


@dataclass(frozen=True)
class Scenario:
    """One run, its changes, and the states allowed meanwhile."""

    steps: Callable[[SlurmJobs, Run], Steps]
    #: The allowed states, in order.
    path: str
    #: Slurm's final state, and a part of the words or the cause.
    word: str | None
    says: str = ""
    script: str = "sleep 250"
    options: tuple[str, ...] = ()


def completed(slurm: SlurmJobs, run: Run) -> Steps:
    yield "COMPLETED"


def failed(slurm: SlurmJobs, run: Run) -> Steps:
    yield "FAILED"


def held_and_cancelled(slurm: SlurmJobs, run: Run) -> Steps:
    yield "PENDING"
    with pytest.raises(SpecError, match="It is in the queue already, and starts by itself"):
        run.requeue()
    run.cancel()
    yield "CANCELLED"


def cancelled_by_scancel(slurm: SlurmJobs, run: Run) -> Steps:
    yield "RUNNING"
    slurm.command("scancel", run.job_id)
    yield "CANCELLED"


def requeued(slurm: SlurmJobs, run: Run) -> Steps:
    log = run.dir.path / "slurm.log"
    yield lambda: log.exists() and "start 0" in log.read_text()
    slurm.command("scontrol", "requeue", run.job_id)
    yield "PENDING"
    yield lambda: run.status().held
    command = "use `hpctrain requeue requeued` to end the delay"
    assert run.status().words == (
        f"BeginTime: waiting for its start time; Slurm delays requeued jobs by 2 minutes; {command}"
    )
    assert run.requeue().state is RunState.PENDING
    yield "COMPLETED"


def waits_for_another(slurm: SlurmJobs, run: Run) -> Steps:
    first = slurm.submit(run.dir.path.parent / "first", "finish COMPLETED", "--hold")
    first.dir.spec.touch()
    wanted, _ = resolve_dependency("afterok:first", run.dir.path.parent, slurm.environ, "runs")
    slurm.command("scontrol", "update", f"JobId={run.job_id}", f"Dependency={wanted}")
    slurm.command("scontrol", "release", run.job_id)
    yield lambda: run.status().words == "Dependency: waiting for another job to end"
    slurm.command("scontrol", "release", first.job_id)
    yield "COMPLETED"
    assert first.status().state is RunState.COMPLETED


def waits_in_vain(slurm: SlurmJobs, run: Run) -> Steps:
    first = slurm.submit(run.dir.path.parent / "vain", "exit 1", "--hold")
    slurm.command("scontrol", "update", f"JobId={run.job_id}", f"Dependency=afterok:{first.job_id}")
    slurm.command("scontrol", "release", run.job_id)
    slurm.command("scontrol", "release", first.job_id)
    yield lambda: "DependencyNeverSatisfied: " in run.status().words
    assert "the job will never start" in run.status().words
    run.cancel()
    yield "CANCELLED"


START = "echo start ${SLURM_RESTART_COUNT:-0}\n"
SECOND_ENDS = START + '[ -n "${SLURM_RESTART_COUNT:-}" ] || sleep 250\nfinish COMPLETED'
#: Not before a status was checked.
ENDS = "until [ -e checked ]; do sleep 0.1; done\nfinish COMPLETED"

SCENARIOS = {
    "completed": Scenario(completed, "PENDING RUNNING COMPLETED", None, script=ENDS),
    "heterogeneous": Scenario(
        *(completed, "PENDING RUNNING COMPLETED", None),
        script=ENDS,
        options=("--ntasks=1", ":", "--ntasks=2"),
    ),
    "failed": Scenario(
        *(failed, "PENDING RUNNING FAILED", "FAILED", "Slurm reports FAILED before any rank started"),
        script="sleep 1; exit 3",
    ),
    # Slurm reports success, but a complete run records it itself.
    "stopped": Scenario(
        failed, "PENDING RUNNING FAILED", "COMPLETED", "Slurm reports COMPLETED", script="sleep 1"
    ),
    "held-cancelled": Scenario(held_and_cancelled, "PENDING CANCELLED", None, options=("--hold",)),
    "scancelled": Scenario(cancelled_by_scancel, "PENDING RUNNING CANCELLED", "CANCELLED"),
    "requeued": Scenario(requeued, "PENDING RUNNING PENDING RUNNING COMPLETED", None, script=SECOND_ENDS),
    "dependent": Scenario(
        *(waits_for_another, "PENDING RUNNING COMPLETED", None), script=ENDS, options=("--hold",)
    ),
    "in-vain": Scenario(waits_in_vain, "PENDING CANCELLED", None, options=("--hold",)),
}


def assert_on_path(seen: list[str], path: str, about: str) -> None:
    """Fail unless the states appear in their order; a short one may be missed."""
    remaining = iter(path.split())
    assert all(state in remaining for state in seen), f"{seen} is not on the path {path}: {about}"


def test_every_state_is_correct_at_every_moment(cluster, tmp_path):
    """Run all scenarios at once and poll all of their runs together."""
    runs, waiting, awaited, seen = {}, {}, {}, {name: [] for name in SCENARIOS}
    for name, scenario in SCENARIOS.items():
        options = ("--ntasks=1", "--time=5", *scenario.options)
        runs[name] = cluster.submit(tmp_path / name, scenario.script, *options)
        waiting[name] = scenario.steps(cluster, runs[name])
        awaited[name] = next(waiting[name])
    begun = time.monotonic()
    last: dict[str, RunStatus] = {}
    checked: Counter[str] = Counter()
    states = JobStates(cluster.environ)
    while waiting or not all(checked[name] for name in SCENARIOS):
        is_late = time.monotonic() - begun > scaled(60)
        assert not is_late, f"still waiting for {awaited}; seen {seen}; checked {checked}"
        before, last = states, dict(zip(runs, query_statuses(list(runs.values())), strict=True))
        states = JobStates(cluster.environ)
        for name, status in last.items():
            checked[name] += check_status(status, before, states, runs[name])
            if checked[name]:
                (tmp_path / name / "checked").touch()
            if seen[name][-1:] != [status.state]:
                seen[name].append(status.state)
            assert_on_path(seen[name], SCENARIOS[name].path, f"{name}: {status}")
        for name in list(waiting):
            condition = awaited[name]
            if condition() if callable(condition) else last[name].state == condition:
                try:
                    awaited[name] = next(waiting[name])
                except StopIteration:
                    del waiting[name]
        time.sleep(0.05)
    for name, scenario in SCENARIOS.items():
        assert last[name].job_state == scenario.word, name
        assert scenario.says in f"{last[name].words} {last[name].cause}", name


def submit_array(
    slurm: SlurmJobs, folder: Path, script: str, tasks: int, *options: str, at_once: int = 20
) -> Run:
    """Submit a job array; each task is a run in its own folder, where the script runs."""
    begin = "cd task-$SLURM_ARRAY_TASK_ID\n"
    for index in range(tasks):
        (folder / f"task-{index}").mkdir(parents=True)
    job_id = slurm.sbatch(folder, begin + script, f"--array=0-{tasks - 1}%{at_once}", "--ntasks=1", *options)
    for index in range(tasks):
        slurm.record(folder / f"task-{index}", f"{job_id}_{index}")
    return slurm.record(folder, job_id)


def follow_tasks(run: Run, limit_s: float, paths: dict[int, str] | None = None) -> Iterator[RunStatus]:
    """Yield the status of an array until its end, and check that each task is on its path."""
    seen: dict[str, list[str]] = {task.run_id: [] for task in run.tasks()}
    allowed = {run.tasks()[index].run_id: path for index, path in (paths or {}).items()}
    deadline = deadline_in(limit_s)
    states, checked = JobStates(run.environ), 0
    while True:
        assert time.monotonic() < deadline, f"no end after {limit_s} s: {seen}"
        before, (array, *statuses) = states, query_statuses([run, *run.tasks()])
        states = JobStates(run.environ)
        for status, task in zip(statuses, run.tasks(), strict=True):
            checked += check_status(status, before, states, task)
            if seen[status.run_id][-1:] != [status.state]:
                seen[status.run_id].append(status.state)
            path = allowed.get(status.run_id, "PENDING RUNNING COMPLETED")
            assert_on_path(seen[status.run_id], path, str(status))
        assert array.tasks is not None
        assert sum(array.tasks.values()) == len(statuses)
        assert array.words == f"{len(statuses)} tasks: " + ", ".join(
            f"{n} {s}" for s, n in array.tasks.items()
        )
        yield array
        if array.state.ended:
            assert checked > len(statuses)
            return
        time.sleep(0.05)


def test_array_of_20_with_four_at_a_time(cluster, tmp_path):
    script = "sleep 0.3\n[ $SLURM_ARRAY_TASK_ID != 7 ] || exit 1\nfinish COMPLETED"
    run = submit_array(cluster, tmp_path / "r", script, 20, at_once=4)
    messages = set()
    for array_status in follow_tasks(run, 60, {7: "PENDING RUNNING FAILED"}):
        assert array_status.state in (RunState.PENDING, RunState.RUNNING, RunState.FAILED)
        messages |= {status.words for status in query_statuses(run.tasks()[-1:])}
    assert array_status.tasks == {"FAILED": 1, "COMPLETED": 19}
    assert array_status.state is RunState.FAILED
    assert array_status.cause.startswith("r/task-7: Slurm reports FAILED before any rank started")
    assert "JobArrayTaskLimit: the array is already running its maximum number of tasks" in messages


def test_preemption_affects_one_array_task_only(cluster, tmp_path):
    """Accounting reports PREEMPTED, which is not its end."""
    release = tmp_path / "release"
    script = f"touch started-${{SLURM_RESTART_COUNT:-0}}\nuntil [ -e {release} ]; do sleep 0.1; done"
    run = submit_array(cluster, tmp_path / "r", f"{script}\nfinish COMPLETED", 4, "--exclusive")
    victim = run.tasks()[2]
    paths = {2: "PENDING RUNNING PENDING RUNNING COMPLETED"}
    record = ("sacct", "-nXP", "--duplicates", "-o", "State", "-j", victim.job_id)
    cluster.command("scontrol", "update", "PartitionName=preemptible", "GraceTime=0")
    urgent = ""
    try:
        for array_status in follow_tasks(run, 60, paths):
            status = victim.status()
            if array_status.tasks == {"RUNNING": 4} and not urgent:
                node = cluster.command("squeue", "-h", "-j", victim.job_id, "-o", "%N")
                options = ("--partition=urgent", f"--nodelist={node}", "--exclusive", "--parsable")
                urgent = cluster.command("sbatch", *options, "-o", "/dev/null", "--wrap=sleep 1")
            if status.held:
                if isinstance(cluster.box, AccountingSandbox):
                    wait_for(lambda: "PREEMPTED" in cluster.command(*record), 20, "the record of it")
                current = run.status()
                assert current.tasks == {"RUNNING": 3, "PENDING": 1}
                assert current.held
                victim.requeue()
            if (victim.dir.path / "started-1").exists():
                release.touch()
    finally:
        cluster.command("scontrol", "update", "PartitionName=preemptible", "GraceTime=30")
        cluster.command("scancel", urgent, run.job_id)
    assert array_status.state is RunState.COMPLETED


def test_cancelled_pending_tasks_are_not_unknown(cluster, tmp_path):
    """Slurm removes each from the shared record and forgets it."""
    run = submit_array(cluster, tmp_path / "r", "sleep 60", 200, "--hold", at_once=200)
    ours, by_scancel, *_ = run.tasks()
    ours.cancel()
    cluster.command("scancel", by_scancel.job_id)
    for task in (ours, by_scancel):
        assert task.status().state is RunState.CANCELLED
    assert by_scancel.status().words.startswith("cancelled before it started")
    assert run.status().tasks == {"PENDING": 198, "CANCELLED": 2}
    run.cancel()
    for _ in range(3):
        assert run.status().tasks == {"CANCELLED": 200}


def test_array_task_is_requeued_while_others_are_pending(slurm, tmp_path):
    """If such a task is signalled by its own name, Slurm 22.05 repeats the signal every few seconds."""
    cluster = SlurmJobs(slurm, environment(slurm.env))
    rank = (
        "trap 'echo TERM >>../$SLURM_ARRAY_TASK_ID; exit 75' TERM; touch ready; while :; do sleep 0.1; done"
    )
    script = f'srun bash -c "{rank}"\nscontrol requeue $SLURM_JOB_ID\nsleep 60'
    run = submit_array(cluster, tmp_path / "r", script, 4, at_once=2)
    first, second, third, _ = run.tasks()
    try:
        for task in (first, second):
            wait_for((task.dir.path / "ready").exists, 20, "the tasks to run")
        second.requeue()
        wait_for(lambda: second.status().state is RunState.PENDING, 20, "the task to be requeued")
        wait_for((third.dir.path / "ready").exists, 20, "another task to take its place")
        assert first.status().state is RunState.RUNNING
        assert [path.name for path in run.dir.path.iterdir() if path.name.isdigit()] == ["1"]
        with pytest.raises(SchedulerError, match="No rank of job"):
            SlurmBackend(cluster.environ).requeue([JobRecord(second.job_id, second.dir)])
    finally:
        run.cancel()
