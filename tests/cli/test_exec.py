"""`hpctrain exec`: any program as a rank."""

import json
import os
import signal
import socket
import sys

import pytest
from helpers.commands import run_command

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

PRINT_CALL = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
DUMP = [sys.executable, "-S", "-c", PRINT_CALL]
SET = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


@pytest.fixture
def hpctrain(tmp_path):
    """Run the command in its own process, which becomes the program, in a folder with a script."""
    (tmp_path / "train.py").touch()

    def call(*args, env=None):
        return run_command([sys.executable, "-m", "hpctrain", *args], env, cwd=tmp_path, check=False)

    return call


def variables(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


def test_program_gets_rank_variables_and_arguments(hpctrain):
    arguments = ["--", "--help", "$(x)", "a b", ""]
    result = hpctrain("exec", "--", *DUMP, *arguments)
    assert result.returncode == 0, result.stderr
    argv, environ = json.loads(result.stdout)
    assert argv == arguments
    port = int(environ["MASTER_PORT"])
    assert [environ[name] for name in SET] == ["0", "0", "1", "1", "0", "0", "127.0.0.1", str(port)]
    assert port > 0


def test_existing_variables_are_not_changed(hpctrain):
    existing = variables("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 NODE_RANK=1")
    existing |= variables("MASTER_ADDR=somewhere MASTER_PORT=12345 GLOO_SOCKET_IFNAME=mine")
    _, environ = json.loads(hpctrain("exec", *DUMP, env=existing).stdout)
    assert {name: environ[name] for name in existing} == existing
    assert environ["GROUP_RANK"] == "1"


@pytest.mark.parametrize(
    ("command", "returncode"),
    [("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM), ("kill -KILL $$", -signal.SIGKILL)],
)
def test_exec_ends_with_exit_code_or_signal_of_program(hpctrain, command, returncode):
    assert hpctrain("exec", "sh", "-c", command).returncode == returncode


def test_signal_handling_of_the_caller_is_restored():
    """Python ignores SIGPIPE; a program that inherits this never ends in `program | head`."""
    show = ["grep", "SigIgn", "/proc/self/status"]
    plain = run_command(show).stdout
    assert run_command([sys.executable, "-m", "hpctrain", "exec", *show]).stdout == plain


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("no-such-program", 127, "Error: cannot run 'no-such-program': not found on PATH.\n"),
        ("train.py", 127, "not found on PATH. Did you mean `hpctrain exec -- python train.py --lr 'a b'`?\n"),
        ("/", 126, "Permission denied.\n"),
    ],
)
def test_unrunnable_program_is_a_one_line_error_with_shell_exit_code(hpctrain, program, code, message):
    result = hpctrain("exec", program, "--lr", "a b")
    assert result.returncode == code
    assert result.stderr.endswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_rank_does_not_wait_for_its_peers_and_reports_a_used_port(hpctrain):
    step = variables("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2")
    step |= variables("SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost")
    step["SLURM_STEP_ID"] = str(os.getpid())
    _, environ = json.loads(hpctrain("exec", *DUMP, env=step).stdout)
    port = int(environ["MASTER_PORT"])
    with socket.create_server(("", port)):
        result = hpctrain("exec", "true", env=step)
    assert result.returncode == 1
    assert f"rank 0 cannot listen on port {port} (Address already in use)" in result.stderr
    assert "Traceback" not in result.stderr


def test_single_process_in_job_with_many_tasks_gets_a_hint(hpctrain):
    result = hpctrain("exec", "true", env={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert result.returncode == 0
    assert "the job has 8 tasks (SLURM_NTASKS). Put srun before" in result.stderr
    assert hpctrain("exec", "true").stderr == ""


def test_ranks_of_a_step_agree_on_address_and_port(slurm, tmp_path):
    step = ["srun", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/%t"]
    run_command([*step, sys.executable, "-m", "hpctrain", "exec", "--", *DUMP], slurm.env)
    seen = [json.loads((tmp_path / str(rank)).read_text())[1] for rank in range(4)]
    assert [environ["RANK"] for environ in seen] == ["0", "1", "2", "3"]
    assert [environ["LOCAL_RANK"] for environ in seen] == ["0", "1", "0", "1"]
    assert [environ["NODE_RANK"] for environ in seen] == ["0", "0", "1", "1"]
    assert {environ["WORLD_SIZE"] for environ in seen} == {"4"}
    assert len({environ["MASTER_PORT"] for environ in seen}) == 1
    assert all(environ["MASTER_ADDR"] for environ in seen)
