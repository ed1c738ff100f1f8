"""Runs of modules and commands, including hang detection without a Trainer."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

MODULE = """
import os, sys
from .place import PLACE
print(PLACE, "rank", os.environ["RANK"], sys.argv[1:], flush=True)
"""
#: Two ranks that synchronize at each step, and save nothing. `FAULT STEP`: rank 1 sleeps in the first
#: attempt, or fails in each, or fails once and then trains nothing.
TRAINING = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
fault, mark = sys.argv[1], os.path.join(os.environ["HPCTRAIN_RUN_DIR"], "trained-before")
if fault == "refuse" and os.path.exists(mark):
    sys.exit()
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
def pause_here():
    time.sleep(1000)
for step in range(40):
    if step == int(sys.argv[2]) and os.environ["RANK"] == "1":
        open(mark, "w").close()
        if fault == "raise":
            raise ValueError("bad sample")
        if fault == "refuse":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["HPCTRAIN_ATTEMPT"] == "0":
            pause_here()
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
os._exit(0)
"""

OPTIONS = ["--backend=local", "--ntasks-per-node=2", "--run-dir=run", "--standby-workers=never"]


@pytest.fixture
def workdir(tmp_path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "place.py").write_text('PLACE = "in the package"\n')
    (package / "main.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "run.sh").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "train.sh").write_text(f'{sys.executable} train.py "$@" || exit $?\n')
    return tmp_path


def submit(workdir: Path, *args: str) -> tuple[RunDir, int, str]:
    hpctrain = [sys.executable, "-m", "hpctrain", "submit", *OPTIONS, "--follow", *args]
    result = run_command(hpctrain, cwd=workdir, check=False, timeout=100)
    return RunDir(workdir / "run"), result.returncode, result.stdout + result.stderr


@pytest.mark.extended
@pytest.mark.parametrize(
    "program", [["-m", "package.main"], ["--", "./run.sh", "-m", "package.main"]], ids=["module", "command"]
)
def test_module_and_commands_run_with_their_arguments(workdir, program):
    run, code, printed = submit(workdir, *program, "--lr", "1 2")
    assert code == 0
    for rank in (0, 1):
        assert f"in the package rank {rank} ['--lr', '1 2']" in run.rank_log(0, rank).read_text()
    assert "COMPLETED" in printed


@pytest.mark.extended
def test_ranks_that_a_command_starts_are_those_of_the_report(workdir):
    options = ["--ntasks-per-node=1", "--checkpoints=*.pt", "--", "sh", "-c"]
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 train.py none 50"
    run, code, printed = submit(workdir, *options, f"{torchrun} && touch last.pt")
    assert code == 0, printed
    report = run_command([sys.executable, "-m", "hpctrain", "report", run.path, "--json"], cwd=workdir)
    document = json.loads(report.stdout)
    (attempt,) = document["attempts"]
    assert (attempt["world_size"], attempt["nodes"]) == (2, 1)
    assert (attempt["first_step"], attempt["last_step"], document["step"]) == (1, 40, 40)
    assert [saved["path"] for saved in document["script_checkpoints"]] == [str(workdir / "last.pt")]


@pytest.mark.slow
def test_tasks_of_an_array_run_a_module_from_the_snapshot(workdir):
    (workdir / "package" / "place.py").write_text("PLACE = __file__\n")
    for command in (["init", "-q"], ["add", "."]):
        run_command(["git", *command], cwd=workdir)
    run, code, printed = submit(workdir, "--array=0-1", "-m", "package.main")
    assert code == 0, printed
    for task in run.tasks():
        log = run.task(task).rank_log(0, 1).read_text()
        assert f"{run.code}/submission-000/package/place.py rank 1" in log
    assert run.tasks() == [0, 1]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("program", "step"),
    [
        pytest.param(["train.py"], "0", marks=pytest.mark.long),
        # The second attempt trains for less time than between two heartbeats.
        (["train.py"], "20"),
        pytest.param(["--", "sh", "train.sh"], "20", marks=pytest.mark.long),
    ],
    ids=["before the first step", "between steps", "shell"],
)
def test_sleeping_rank_of_a_plain_script_is_reported_and_the_run_restarted(workdir, program, step):
    run, code, printed = submit(workdir, "--hang-timeout=2", *program, "sleep", step)
    assert code == 0, printed
    causes = [event["cause"] for event in events(run, "failure")]
    assert len(causes) == 1
    assert re.match(r"hung: .*; rank 1 on .*pause_here \(train.py:", causes[0], re.DOTALL)
    assert "in pause_here" in run.stacks(0, 1).read_text()
    assert "trained" in run.rank_log(1, 0).read_text()


#: Ranks that train until they are stopped, save every ten steps, and record each step. Each has two data
#: workers.
STOPPED = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
rank, run = os.environ["RANK"], Path(os.environ["HPCTRAIN_RUN_DIR"])
if "alone" not in sys.argv:
    dist.init_process_group("gloo")
layer = torch.nn.Linear(1, 1)
model = layer if "alone" in sys.argv else torch.nn.parallel.DistributedDataParallel(layer)
optimizer = getattr(torch.optim, sys.argv[1])(layer.parameters(), lr=0.1)
saved = run / "checkpoints" / "state.pt"
saved.parent.mkdir(exist_ok=True)
step = 0
if saved.exists():
    state = torch.load(saved)
    step = state["step"]
    optimizer.load_state_dict(state["optimizer"])
waits = "until stopped" in sys.argv and os.environ["HPCTRAIN_ATTEMPT"] == "0"
last = step + 30
batches = iter(torch.utils.data.DataLoader(range(10**6), num_workers=2))
while waits or step < last:
    time.sleep(0.02)
    next(batches)
    model(torch.ones(1, 1)).sum().backward()
    step += 1
    with open(run / f"steps-{os.environ['HPCTRAIN_ATTEMPT']}-{rank}", "a") as file:
        print(step, file=file)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and rank == "0":
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, saved)
"""


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(run.events) if event["kind"] == kind]


def recorded_steps(run: RunDir, attempt: int, rank: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(line) for line in (run.path / f"steps-{attempt}-{rank}").read_text().split()]
    return []


@pytest.mark.extended
def test_ranks_stop_after_the_same_step_and_steps_are_recorded(workdir):
    (workdir / "train.py").write_text(STOPPED)
    run = RunDir(workdir / "run")
    hpctrain = [sys.executable, "-m", "hpctrain"]
    command = [*hpctrain, "submit", *OPTIONS, "train.py", "Adam", "until stopped"]
    run_command(command, cwd=workdir)
    wait_for(lambda: len(recorded_steps(run, 0, 0)) > 25, 60, "25 steps")
    run_command([*hpctrain, "requeue", "run"], cwd=workdir)
    run_command([*hpctrain, "wait", "run"], cwd=workdir)
    first, second = (recorded_steps(run, 0, rank) for rank in (0, 1))
    assert first == second
    message = f"received SIGTERM (requeue); all ranks exit after step {first[-1]} of this attempt."
    assert message in run.rank_log(0, 0).read_text()
    resumed = (first[-1] - 1) // 10 * 10  # Steps are saved after the optimizer.
    assert recorded_steps(run, 1, 0) == list(range(resumed + 1, resumed + 31))
    assert [event["step"] for event in events(run, "resumed")] == [resumed]
    metrics = list(read_json_lines(run.metrics))
    assert [line["step"] for line in metrics if line["attempt"] == 0][-1] == first[-1]
    assert {line["attempt"] for line in metrics} <= {0, 1}
    done = run_command([*hpctrain, "status", "run"], cwd=workdir).stdout
    assert f"step        {resumed + 30}" in done


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [[], pytest.param(["--independent-ranks"], marks=pytest.mark.long)],
    ids=["alone", "independent"],
)
def test_ranks_that_train_alone_fail_the_run_unless_they_are_independent(workdir, options):
    (workdir / "train.py").write_text(STOPPED)
    run, code, printed = submit(workdir, *options, "train.py", "SGD", "alone")
    assert (code == 0) == bool(options), printed
    if not options:
        (failure,) = events(run, "failure")
        assert failure["class"] == "user-error"
        assert "completed 20 optimizer steps without a process group, so each rank trains alone" in printed
        assert "use the variable LOCAL_RANK instead" in printed
        assert "--independent-ranks" in printed


@pytest.mark.extended
@pytest.mark.parametrize(
    ("failure", "cause"),
    [("raise", "ValueError: bad sample"), ("refuse", "attempt 1 trained no step and exited with code 0")],
)
def test_script_that_always_fails_and_saves_nothing_ends(workdir, failure, cause):
    run, code, printed = submit(workdir, "train.py", failure, "15")
    assert code != 0
    assert cause in printed
    assert run.attempts() == [0, 1]
    assert events(run, "resumed") == []
    # Each attempt counts its steps from 1.
    steps = [line["step"] for line in read_json_lines(run.metrics)]
    assert max(steps) <= 15


SAVES_ELSEWHERE = """
import os, signal, time, torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
first = 1
if os.path.exists("own.pt"):
    state = torch.load("own.pt")
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
for step in range(first, 31):
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, "own.pt")
    if step % 5 == 0 and step < 30:
        time.sleep(2)  # the steps are recorded every second
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.extended
def test_script_that_resumes_from_files_that_hpctrain_does_not_know_makes_progress(workdir):
    (workdir / "train.py").write_text(SAVES_ELSEWHERE)
    (workdir / "job.sh").write_text(f"#!/bin/bash\n{sys.executable} train.py\n")
    run, code, printed = submit(workdir, "job.sh")
    assert code == 0, printed
    assert len(run.attempts()) == 6, "more than --max-failures"
    assert [event["step"] for event in events(run, "resumed")] == [5, 10, 15, 20, 25]
    assert "no known checkpoint" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "num_attempts"), [("pt", 5), ("log", 2)])
def test_only_files_that_match_the_pattern_are_progress(workdir, suffix, num_attempts):
    """A script that fails in each of its first attempts, and writes a file in each."""
    (workdir / "job.sh").write_text(
        f"#!/bin/sh\nmkdir -p out/epochs\ntouch out/epochs/$HPCTRAIN_ATTEMPT.{suffix}\n"
        "[ $HPCTRAIN_ATTEMPT = 4 ] || exit 3\n"
    )
    run, code, printed = submit(workdir, "--max-failures=2", "--checkpoints=out/**/*.pt", "job.sh")
    assert (code == 0) == (suffix == "pt"), printed
    assert len(run.attempts()) == num_attempts
    written = [f"{workdir}/out/epochs/{attempt}.pt" for attempt in run.attempts() if suffix == "pt"]
    assert [event["path"] for event in events(run, "checkpoint")] == written


CHANGES_ITS_RATE = """
import os, signal, sys, time, torch
steps, lr = int(sys.argv[1]), float(sys.argv[2])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
if os.path.exists("own.pt"):
    optimizer.load_state_dict(torch.load("own.pt"))
    if "set" in sys.argv:
        optimizer.param_groups[0]["lr"] = lr
for _ in range(steps):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
if "die" in sys.argv and not os.path.exists("died"):
    open("died", "w").close()
    time.sleep(2)  # until the message is printed
    os.kill(os.getpid(), signal.SIGKILL)
torch.save(optimizer.state_dict(), "own.pt")
"""


@pytest.mark.extended
def test_argument_that_the_loaded_optimizer_replaces_is_named(workdir):
    (workdir / "train.py").write_text(CHANGES_ITS_RATE)
    (workdir / "job.sh").write_text(f'#!/bin/bash\n{sys.executable} train.py "$@"\n')
    submit(workdir, "job.sh", "3", "0.1")
    hpctrain = [sys.executable, "-m", "hpctrain"]
    reports = {}
    for arguments in (["3", "0.5", "die"], ["3", "0.5", "set", "again"]):
        printed = run_command([*hpctrain, "resume", "run", "--follow", "--", *arguments], cwd=workdir).stdout
        report = run_command([*hpctrain, "report", "run", "--json"], cwd=workdir).stdout
        reports[len(arguments)] = printed, report
    printed, report = reports[3]
    # Not at the restart, at which the script sets what it has set before.
    assert printed.count("lr remains 0.1, the value in the checkpoint, although the script now sets 0.5") == 1
    assert "# lr remained 0.1, the value in the checkpoint, although the script set 0.5" in report
    assert not any("lr remain" in text for text in reports[4])


def test_script_under_srun_and_exec(slurm, tmp_path):
    """Without a supervisor, the ranks agree on a port themselves."""
    step = ["srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "hpctrain", "exec", "--"]
    script = [sys.executable, REPOSITORY / "examples" / "plain_ddp.py", "--save-every=100", "--max-steps=200"]
    env = {**slurm.env, "OMP_NUM_THREADS": "1"}
    result = run_command([*step, *script], env, cwd=tmp_path, timeout=200, check=False)
    # exec has become the script, and torch may abort it at interpreter exit (see runtime/release_devices.py).
    aborted = "terminate called without an active exception" in result.stderr
    assert result.returncode == (134 if aborted else 0), result.stderr
    assert result.stdout.count("step 200: loss") == 1
    assert (tmp_path / "checkpoints" / "plain_ddp.pt").exists()
