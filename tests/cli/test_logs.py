"""`hpctrain logs` for runs with several ranks."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from helpers.commands import environment
from helpers.processes import assert_no_process_left
from helpers.run_histories import FAILURE, RunHistory, started_run, write_run
from helpers.waiting import wait_for

from hpctrain.rundir import RunDir

#: The second rank prints first, by two entries of the log index.
SCRIPT = """
import os, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["HPCTRAIN_ATTEMPT"])
print("early", rank, flush=True) if rank == 1 else None
time.sleep(2.5)
print("late", rank, "of", attempt, flush=True)
if rank == 1 and attempt == 0:
    raise ValueError("no such thing")
"""
TWO_RANKS = ("--backend", "local", "--ntasks-per-node", "2", "--run-dir", "r")


@pytest.fixture
def crashed_once(hpctrain, tmp_path):
    """A run that failed once and then completed."""
    (tmp_path / "crash.py").write_text(SCRIPT)
    retry = ("--restart-policy", "user-error.retries=1")
    result = hpctrain("submit", *TWO_RANKS, *retry, "--follow", "crash.py")
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.extended
@pytest.mark.ranks
def test_logs_of_all_ranks_are_merged_by_time(hpctrain, crashed_once):
    # --follow prints the output of rank 0 only.
    assert crashed_once.stdout.splitlines()[-1] == "late 0 of 1"
    assert "[" not in crashed_once.stdout

    first, *others = hpctrain("logs", "r").stdout.splitlines()
    assert first == "[1] early 1"
    assert sorted(others) == ["[0] late 0 of 1", "[1] late 1 of 1"]
    assert hpctrain("logs", "r", "--rank", "1").stdout == "early 1\nlate 1 of 1\n"
    assert hpctrain("logs", "r", "--rank", "1", "--rank", "0").stdout.startswith("[1] early 1\n")
    assert "late 0 of 0" in hpctrain("logs", "r", "--rank", "0", "--attempt", "0").stdout
    assert hpctrain("logs", "r", "--attempt", "2").returncode == 2
    assert "Available: attempts 0-1" in hpctrain("logs", "r", "--attempt", "2").stderr
    followed = hpctrain("logs", "-f", "r")
    assert followed.stdout.splitlines()[0] == first
    assert sorted(followed.stdout.splitlines()[1:]) == sorted(others)
    assert hpctrain("logs", "-f", "r", "--attempt", "0").stdout.splitlines()[0] == "[1] early 1"
    assert "of 1" not in hpctrain("logs", "-f", "r", "--attempt", "0").stdout

    errors = hpctrain("logs", "r", "--errors")
    assert errors.stdout.startswith("attempt 0: rank 1 on ")
    assert 'raise ValueError("no such thing")' in errors.stdout
    assert hpctrain("logs", "-f", "r", "--errors").stdout == errors.stdout
    empty = hpctrain("logs", "r", "--errors", "--attempt", "1")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "Run r has no recorded failures in attempt 1." in empty.stderr


@pytest.mark.extended
@pytest.mark.ranks
def test_crash_before_the_log_is_opened_is_reported_from_slurm_log(hpctrain, tmp_path):
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "json.py").write_text("raise ImportError('shadowed')\n")
    options = ("--max-failures", "2", "--env", f"PYTHONPATH={shadow}", "--follow")
    result = hpctrain("submit", *TWO_RANKS, *options, "train.py")
    assert result.returncode == 4
    assert "attempt 0 failed; restarting" in result.stderr
    pattern = re.compile(
        r"attempt 1: failure: rank [01] on local-0: exit code 1: ImportError: shadowed \(log: (.*)\)"
    )
    match = pattern.search(result.stderr)
    assert match is not None, result.stderr
    assert match[1] == str(tmp_path / "r" / "logs" / "slurm.log")

    status = json.loads(hpctrain("status", "r", "--json").stdout)
    assert status["cause"].endswith("exit code 1: ImportError: shadowed")
    assert status["log"] == match[1]
    errors = hpctrain("logs", "r", "--errors").stdout
    assert "    raise ImportError('shadowed')\nImportError: shadowed\nlog: " in errors
    empty = hpctrain("logs", "r")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "Run r is FAILED: its ranks wrote no output. Use `hpctrain logs --errors`" in empty.stderr
    assert "wrote no output in attempt 0." in hpctrain("logs", "r", "--attempt", "0").stderr


@pytest.mark.extended
@pytest.mark.ranks
def test_following_an_array_shows_all_tasks_and_reports_a_failed_one(hpctrain, tmp_path):
    (tmp_path / "task.py").write_text(
        "import os\n"
        "task, rank = os.environ['HPCTRAIN_ARRAY_TASK_ID'], os.environ['RANK']\n"
        "print('task', task, 'has rank', rank, flush=True)\n"
        "print('no end of the line', end='')\n"
        "assert task != '9', 'nine is bad'\n"
    )
    array = ("--array", "9-10%2", "--max-failures", "1", *TWO_RANKS)
    result = hpctrain("submit", *array, "--follow", "task.py")
    assert result.returncode == 4, result.stderr
    lines = result.stdout.splitlines()
    # Only rank 0 of each task.
    assert {line for line in lines if "has rank" in line} == {
        *("[task-9]  task 9 has rank 0", "[task-10] task 10 has rank 0")
    }
    assert "[task-10] no end of the line" in lines
    assert re.search(r"== job is [A-Z]+ \(2 tasks: ", result.stderr)
    assert "== [task-10] attempt 0: starting, world size 2, nodes 1" in result.stderr
    assert re.search(
        r"== \[task-9\]  attempt 0: failure: rank [01] on .*: AssertionError: nine is bad", result.stderr
    )
    assert "r: FAILED, 2 tasks: 1 FAILED, 1 COMPLETED" in result.stderr

    followed = hpctrain("logs", "-f", "r", "--rank", "1", "--rank", "0")
    assert followed.returncode == 4
    assert "[task-10] [1] task 10 has rank 1" in followed.stdout.splitlines()
    errors = hpctrain("logs", "-f", "r", "--errors").stdout.splitlines()
    assert errors[0].startswith("[task-9]  attempt 0: rank ")
    assert all(line.startswith("[task-9]  ") for line in errors)

    # When only some tasks of an array are submitted again, the others are not shown.
    resubmitted = hpctrain("submit", *array[2:], "--array", "9", "--follow", "task.py")
    assert {line[:8] for line in resubmitted.stdout.splitlines()} == {"[task-9]"}
    refused = hpctrain("logs", "r")
    assert refused.returncode == 2
    assert "a job array of 2 tasks" in refused.stderr
    assert "such as r/task-9" in refused.stderr


@pytest.mark.extended
@pytest.mark.ranks
def test_interrupting_logs_keeps_the_run_alive(hpctrain, tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    assert hpctrain("submit", *TWO_RANKS, "slow.py").returncode == 0
    command = [sys.executable, "-m", "hpctrain", "logs", "-f", "r"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert lines == ["[0] here\n", "[1] here\n"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Detached. The run continues." in err
    assert '"state": "RUNNING"' in hpctrain("status", "r", "--json").stdout
    hpctrain("cancel", "r")
    wait_for(lambda: '"CANCELLED"' in hpctrain("status", "r", "--json").stdout, 30, "the end")
    assert_no_process_left(tmp_path / "r")


HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link \x9b5n\x1bc\x00\ttab\r\n"


@pytest.mark.parametrize("options", [[], ["--errors"]])
def test_terminal_output_keeps_colours_but_no_other_escapes(hpctrain, tmp_path, options):
    run = RunDir(tmp_path / "r")
    run.attempt_logs(0).mkdir(parents=True)
    run.failures.mkdir()
    run.spec.touch()
    run.rank_log(0, 0).write_text(HOSTILE)
    run.log_event("submitted", 0, job_id="1", backend="local")
    run.log_event("failure", 0, rank=0, cause=f"x{HOSTILE}", log=str(run.rank_log(0, 0)))
    run.failure(0, 0).write_text(json.dumps({**FAILURE, "traceback": HOSTILE}))
    master, slave = pty.openpty()
    argv = [sys.executable, "-m", "hpctrain", "logs", "r", *options]
    subprocess.run(argv, cwd=tmp_path, env=environment(), stdout=slave, check=True, timeout=120)
    os.close(slave)
    output = os.read(master, 65536).decode()
    os.close(master)
    assert "\x1b[31mred\x1b[0m link" in output
    assert "\ttab" in output
    assert not re.search(r"\x1b(?!\[(31|0)m)|[\x00\x07\x9b]|title|http", output)
    # A pipe gets the unchanged output, for a pager or a file.
    assert "\x1b]0;title\x07" in hpctrain("logs", "r", *options).stdout


def test_errors_do_not_show_native_stacks(hpctrain, tmp_path):
    run = RunDir(tmp_path / "r")
    run.attempt_logs(0).mkdir(parents=True)
    run.failures.mkdir()
    run.spec.touch()
    log = run.rank_log(0, 1)
    log.write_text(
        "what(): [enforce fail at pair.cc:446]\nFatal Python error: Aborted\n"
        "Current thread's C stack trace (most recent call first):\n"
        + '  Binary file "/usr/lib/libpython3.so", at _Py_DumpStack+0x50 [0x7f66]\n' * 30
        + "  <truncated rest of calls>\n\nExtension modules: torch._C (total: 117)\n"
    )
    run.log_event("submitted", 0, job_id="1", backend="local")
    run.log_event("failure", 0, rank=1, cause="rank 1 on n1: SIGABRT", log=str(log))
    run.failure(0, 1).write_text(
        json.dumps({**FAILURE, "rank": 1, "error": "SIGABRT", "traceback": "", "log": str(log)})
    )
    shown = hpctrain("logs", "r", "--errors").stdout
    assert "  what(): [enforce fail at pair.cc:446]\n  Fatal Python error: Aborted\n" in shown
    assert "Binary file" not in shown
    assert "Extension modules" not in shown


CAUSE = """
import os
import torch
import hpctrain


class Line(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if os.environ["RANK"] == "1" and batch_idx == 3:
            {"a": 1}["smoothing"]
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = torch.utils.data.TensorDataset(torch.ones(80, 1))
hpctrain.Trainer(max_steps=20, global_batch_size=8, seed=1).fit(Line(), data)
"""


@pytest.mark.extended
@pytest.mark.ranks
def test_failure_shows_cause_with_user_frames_and_one_line_per_victim(hpctrain, tmp_path):
    (tmp_path / "cause.py").write_text(CAUSE)
    result = hpctrain("submit", *TWO_RANKS, "--max-failures", "1", "--follow", "cause.py")
    assert result.returncode == 4
    (victim,) = [line for line in result.stdout.splitlines() if line.startswith("hpctrain: ")]
    assert victim.startswith(
        "hpctrain: this rank exited because rank 1 on local-0 failed (KeyError): Runtime"
    )
    assert "Traceback" not in result.stdout
    lines = [line.strip() for line in result.stderr.splitlines()]
    first = lines.index("Traceback (most recent call last):")
    assert lines.count("Traceback (most recent call last):") == 1
    assert lines[first - 1].startswith("== attempt 0: failure: rank 1 on local-0: KeyError: 'smoothing'")
    trace = lines[first + 1 : lines.index("KeyError: 'smoothing'")]
    assert [line for line in trace if line.startswith("…")] == [trace[2]]
    assert '{"a": 1}["smoothing"]' in trace
    assert not any("torch/" in line for line in trace)
    rest = lines[lines.index("KeyError: 'smoothing'") :]
    assert sum(line.startswith("also rank 0: RuntimeError") for line in rest) == 1, rest

    errors = hpctrain("logs", "r", "--errors").stdout.splitlines()
    assert errors[0] == "attempt 0: rank 1 on local-0: KeyError: 'smoothing'"
    assert not any("torch/" in line for line in errors[: errors.index("KeyError: 'smoothing'")])
    assert [line.startswith("also rank 0: RuntimeError") for line in errors][-1]


def test_failures_before_the_last_submission_are_found_by_attempt(hpctrain, tmp_path):
    history = RunHistory().after(0, "submitted", job_id="1", backend="local").after(1, "started", nodes=1)
    history.after(1, "failure", rank=0, cause="rank 0: ValueError: first")
    history.after(1, "finished", state="FAILED", exit_code=4, cause="rank 0: ValueError: first")
    history.after(9, "submitted", job_id="2", backend="local").after(1, "started", nodes=1)
    history.after(1, "finished", state="COMPLETED", exit_code=0)
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    run.spec.write_text(json.dumps({"script": "train.py"}))  # which is YAML
    run.events.write_text("".join(json.dumps(event.fields()) + "\n" for event in history.events))

    none = hpctrain("logs", "r", "--errors")
    assert none.stdout == ""
    assert "no recorded failures since the last submission. For the failures of attempt 0" in none.stderr
    for options in ([], ["-f"]):
        result = hpctrain("logs", "r", "--errors", "--attempt", "0", *options)
        assert result.stdout.splitlines()[0] == "attempt 0: rank 0: ValueError: first"
        none = hpctrain("logs", "r", "--errors", "--attempt", "1", *options)
        assert none.stdout == ""


def test_file_of_the_errors_of_a_batch_script_is_named(hpctrain, tmp_path):
    run = write_run(tmp_path / "r", started_run(), script="job.sh")
    log = run.rank_log(0, 0)
    log.parent.mkdir(parents=True)
    log.touch()
    run.slurm_log.symlink_to(tmp_path / "e.txt")
    run.batch_script.touch()
    message = f"The script writes its errors to {tmp_path / 'e.txt'} (--error)."
    assert message in hpctrain("logs", "r").stderr
