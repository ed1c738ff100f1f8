"""`hpctrain exec`: any program as a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers.commands import environment, run_command

DUMP = [
    sys.executable,
    "-S",
    "-c",
    "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))",
]
SET = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def test_the_program_gets_its_rank_and_its_words(hpctrain):
    words = ["--", "--help", "$(x)", "a b", ""]
    done = hpctrain("exec", "--", *DUMP, *words)
    assert done.returncode == 0, done.stderr
    argv, environ = json.loads(done.stdout)
    assert argv == words
    port = int(environ["MASTER_PORT"])
    assert [environ[name] for name in SET] == ["0", "0", "1", "1", "0", "0", "127.0.0.1", str(port)]
    assert 20_000 <= port < 32_000


def test_nothing_that_is_set_already_is_changed(hpctrain):
    given = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "somewhere",
        "MASTER_PORT": "12345",
        "GLOO_SOCKET_IFNAME": "mine",
    }
    _, environ = json.loads(hpctrain("exec", *DUMP, env=given).stdout)
    assert {name: environ[name] for name in given} == given
    assert environ["GROUP_RANK"] == "1"


@pytest.mark.parametrize(
    ("words", "code"), [("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM), ("kill -KILL $$", -signal.SIGKILL)]
)
def test_the_end_is_the_programs_own(hpctrain, words, code):
    assert hpctrain("exec", "sh", "-c", words).returncode == code


def test_it_becomes_the_program(tmp_path):
    command = [sys.executable, "-m", "hpctrain", "exec", "sh", "-c", "echo $$"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=60)
    assert out == f"{process.pid}\n"


def test_signals_are_handled_as_the_caller_has_them():
    """Python ignores SIGPIPE; a program that inherits that never ends in `program | head`."""
    show = ["grep", "SigIgn", "/proc/self/status"]
    plain = run_command(show).stdout
    assert run_command([sys.executable, "-m", "hpctrain", "exec", *show]).stdout == plain


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("no-such-program", 127, "Error: cannot run 'no-such-program': not found on PATH.\n"),
        ("./no-such-program", 127, "No such file or directory.\n"),
        (
            "train.py",
            127,
            "not found on PATH. Did you mean: hpctrain exec -- python train.py --lr 'a b'\n",
        ),
        (
            "./train.py",
            126,
            "Permission denied. Did you mean: hpctrain exec -- python ./train.py --lr 'a b'\n",
        ),
        ("/", 126, "Permission denied.\n"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line_with_the_shells_exit_code(hpctrain, program, code, words):
    done = hpctrain("exec", program, "--lr", "a b")
    assert done.returncode == code
    assert done.stderr.endswith(words)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_script_without_a_first_line_is_not_taken_for_one_of_sh(hpctrain, tmp_path):
    (tmp_path / "train.py").chmod(0o755)
    done = hpctrain("exec", "./train.py")
    assert done.returncode == 126
    assert "Exec format error. Did you mean: hpctrain exec -- python ./train.py" in done.stderr


@pytest.mark.parametrize(
    "args",
    [(), ("--",), ("--timeout", "0", "true"), ("--timeout", "inf", "true"), ("--tiemout", "1", "true")],
)
def test_bad_usage_ends_with_2(hpctrain, args):
    assert hpctrain("exec", *args).returncode == 2


def test_ranks_that_contradict_themselves_are_not_started(hpctrain, tmp_path):
    done = hpctrain("exec", "touch", "started", env={"RANK": "4", "WORLD_SIZE": "4"})
    assert done.returncode == 2
    assert "LOCAL_RANK" in done.stderr
    assert not (tmp_path / "started").exists()


def test_peers_that_do_not_come_end_it_in_time_and_in_words(hpctrain, tmp_path):
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": str(os.getpid()),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    done = hpctrain("exec", "--timeout", "0.3", "touch", "started", env=step)
    assert done.returncode not in (0, None)
    assert "rank 0" in done.stderr
    assert done.stderr.endswith("If ranks start late, increase --timeout (0.3 s).\n")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_one_process_of_a_job_with_several_tasks_is_remarked(hpctrain):
    done = hpctrain("exec", "true", env={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert done.returncode == 0
    assert "the job has 8 tasks (SLURM_NTASKS). Put srun before" in done.stderr
    assert hpctrain("exec", "true").stderr == ""


def test_it_starts_without_torch():
    done = run_command([sys.executable, "-X", "importtime", "-m", "hpctrain", "exec", "true"])
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hpctrain.cluster.rendezvous" in imported
    assert not {"torch", "numpy", "rich", "asyncio"} & imported


def test_the_ranks_of_a_step_get_one_address_and_port(slurm, tmp_path):
    step = ["srun", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/%t"]
    run_command([*step, sys.executable, "-m", "hpctrain", "exec", "--", *DUMP], slurm.env)
    seen = [json.loads((tmp_path / str(rank)).read_text())[1] for rank in range(4)]
    assert [environ["RANK"] for environ in seen] == ["0", "1", "2", "3"]
    assert [environ["LOCAL_RANK"] for environ in seen] == ["0", "1", "0", "1"]
    assert [environ["NODE_RANK"] for environ in seen] == ["0", "0", "1", "1"]
    assert {environ["WORLD_SIZE"] for environ in seen} == {"4"}
    assert len({environ["MASTER_PORT"] for environ in seen}) == 1
    assert all(environ["MASTER_ADDR"] for environ in seen)
