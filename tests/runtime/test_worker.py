"""The worker as Slurm starts it: one process, with the variables of a single-task job step."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain.rundir import RunDir

pytestmark = pytest.mark.ranks

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "n1",
    "SLURMD_NODENAME": "n1",
    "HPCTRAIN_ATTEMPT": "4",
}


#: The folder of the run, in a script.
OF_RUN = "from hpctrain.rundir import RunDir\nrun = RunDir(Path(os.environ['HPCTRAIN_RUN_DIR']))\n"


@pytest.fixture
def run(tmp_path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def start(run: RunDir, source: str, *args: str, **kwargs) -> subprocess.Popen[bytes]:
    script = run.path.parent / "script.py"
    script.write_text(source)
    return start_program(run, "script", str(script), *args, **kwargs)


def start_program(run: RunDir, *words: str, **kwargs) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "hpctrain.runtime.worker", json.dumps(words)]
    env = environment({**STEP, "HPCTRAIN_RUN_DIR": str(run.path), **kwargs.pop("env", {})})
    return subprocess.Popen(command, env=env, **kwargs)


def log(run: RunDir, rank: int = 1) -> str:
    return run.rank_log(4, rank).read_text()


def wait_for_output(run: RunDir, text: str = "here", rank: int = 1) -> None:
    wait_for(lambda: run.rank_log(4, rank).exists() and text in log(run, rank), 30, f"the output {text}")


def test_script_has_its_arguments_folder_and_rank(run):
    source = (
        "import os, sys\n"
        "print(sys.argv[1:], os.path.samefile(sys.path[0], os.path.dirname(__file__)), __name__)\n"
        "print({name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')})\n"
    )
    assert start(run, source, "--lr", ":").wait(120) == 0
    assert "['--lr', ':'] True __main__" in log(run)
    assert "{'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '1', 'MASTER_ADDR': 'n1'}" in log(run)


def test_rank_and_its_forks_are_named_in_ps(run):
    source = (
        "import os\n"
        "words = open('/proc/self/cmdline').read().split('\\0')\n"
        "print(words[-2].strip(), words[2:-2])\n"
        "if os.fork() == 0:\n"
        "    print(open('/proc/self/cmdline').read().split('\\0')[-2].strip(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert start(run, source, *["--some-option"] * 3).wait(120) == 0
    assert "rank 1 of 2: script.py ['-m', 'hpctrain.runtime.worker']" in log(run)
    assert "child of rank 1 of 2: script.py" in log(run)


def test_exception_writes_a_failure_file_and_its_traceback(run):
    assert start(run, "def f():\n    raise ValueError('bad\\udcff data')\nf()\n").wait(120) == 1
    failure = json.loads(run.failure(4, 1).read_text())
    assert (failure["rank"], failure["node"], failure["kind"]) == (1, "n1", "exception")
    assert failure["error"] == "ValueError"
    assert "bad" in failure["message"]
    assert "in f" in failure["traceback"]
    assert failure["log"] == str(run.rank_log(4, 1))
    assert "ValueError" in log(run)


@pytest.mark.parametrize(
    ("argument", "code", "failed"),
    [("3", 3, True), ("'no data'", 1, True), ("75", 75, False), ("None", 0, False)],
)
def test_sys_exit_sets_exit_code_and_failure_file(run, argument, code, failed):
    assert start(run, f"import sys\nsys.exit({argument})").wait(120) == code
    assert run.failure(4, 1).exists() is failed
    assert ("no data" in log(run)) is ("data" in argument)


def test_cause_of_an_exit_contains_the_last_output(run):
    source = "import argparse\nargparse.ArgumentParser().parse_args(['--lrr', '0.5'])"
    assert start(run, source).wait(120) == 2
    failure = json.loads(run.failure(4, 1).read_text())
    assert failure["message"].startswith("the script called sys.exit(2) after the output '")
    assert failure["message"].endswith("error: unrecognized arguments: --lrr 0.5'")
    assert failure["traceback"] == ""


def test_unhandled_stop_signal_exits_with_75(run):
    with start(run, "import time\nprint('here')\ntime.sleep(300)") as process:
        wait_for_output(run)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    assert "SIGTERM" not in log(run), "rank 0 alone prints it"
    assert not run.failure(4, 1).exists()


RANK_0 = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
UNUSED = "This script does not use hpctrain's Trainer, so hpctrain has not saved the state. "


@pytest.mark.extended
@pytest.mark.parametrize(
    ("number", "source", "message"),
    [
        (signal.SIGUSR2, "", f"SIGUSR2 (the time limit is near); exiting. {UNUSED}"),
        (signal.SIGTERM, "run.cancel_request.touch()", "SIGTERM (cancellation); exiting. "),
        (
            signal.SIGTERM,
            "run.checkpoints.mkdir(); (run.checkpoints / 'my.pt').touch()",
            "The script's last checkpoint is {checkpoints}/my.pt (",
        ),
        (signal.SIGTERM, "run.function.touch()", "nor returns from its method `checkpoint` is lost."),
        (signal.SIGTERM, "", f"{UNUSED}{{checkpoints}} contains no checkpoint written by the script, so "),
        (
            signal.SIGTERM,
            (
                "from hpctrain.runtime.unfinished_training import TrainingMarker\n"
                "with TrainingMarker('x', None, {}): pass"
            ),
            "No training is in progress. ",
        ),
    ],
)
def test_rank_0_prints_the_signal_and_what_is_lost(run, number, source, message):
    head = f"import os, time\nfrom pathlib import Path\n{OF_RUN}"
    with start(run, f"{head}{source}\nprint('here')\ntime.sleep(300)", env=RANK_0) as process:
        wait_for_output(run, rank=0)
        process.send_signal(number)
        assert process.wait(120) == 75
    (line,) = [line for line in log(run, 0).splitlines() if line.startswith("hpctrain: received ")]
    assert message.format(checkpoints=run.checkpoints) in line


#: The signal arrives while torch is imported.
STOPPED_IMPORT = """
import os, signal, sys
from hpctrain.runtime.stopping.stop_signals import exit_on_stop_signal
exit_on_stop_signal()
class Finder:
    def find_spec(self, name, *_):
        if name == "torch.version":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
try:
    import torch
except BaseException as error:
    print(f"C++ code may turn {error!r} into an abort", flush=True)
    raise
"""


@pytest.mark.slow
def test_signal_during_the_import_of_torch_raises_no_exception_in_it():
    result = subprocess.run(
        [sys.executable, "-c", STOPPED_IMPORT], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (75, ""), result.stderr


#: A finalizer that runs until the signal arrives; Python swallows every exception in it.
SLOW_FINALIZER = """
import os, signal, time
class Swallows:
    def __del__(self):
        print("here")
        for _ in range(300):
            time.sleep(0.1)
Swallows()
"""


def test_stop_during_a_finalizer_is_not_lost(run):
    source = (
        "import hpctrain.runtime.stopping.stop_signals as s\n"
        f"s.EXIT_TIMEOUT_S = 0.5\n{SLOW_FINALIZER}\ntime.sleep(300)"
    )
    with start(run, source) as process:
        wait_for_output(run)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(120) == 75
    assert "Exception ignored in" in log(run)
    assert "after a stop signal, so it exits now" in log(run)


LATE = """
import os, signal, time
import hpctrain.runtime.stopping.stop_signals as s
s.LATE_SIGNAL_TIMEOUT_S = 1.0
with s.capture_stop_signals(repeats_late=True) as flag:
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("", 0),
        ("time.sleep(60)", 75),
        ("with s.capture_stop_signals() as flag: assert flag.signal_name == 'SIGTERM'\ntime.sleep(2)", 0),
    ],
    ids=["script ends", "script continues", "next training"],
)
def test_signal_that_came_too_late_for_a_training(run, rest, code):
    assert start(run, LATE + rest).wait(50) == code


def test_stop_signal_during_interpreter_exit_is_ignored(run):
    source = (
        "import os, sys\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), write=os.write):\n"
        "        kill(pid, 15)\n"
        "        write(1, b'deaf')\n"
        "sys.late = Late()\n"
    )
    assert start(run, source).wait(120) == 0
    assert log(run).endswith("deaf")


def test_error_after_a_swallowed_stop_is_not_a_failure(run):
    source = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
except BaseException:
    pass
raise ImportError('cannot load module more than once per process')
"""
    assert start(run, source).wait(120) == 75
    assert not run.failure(4, 1).exists()


def test_rank_dies_when_its_lifeline_is_closed(run):
    read_fd, write_fd = os.pipe()
    source = "import subprocess, time\nsubprocess.Popen(['sleep', '300'])\nprint('here')\ntime.sleep(300)"
    env = {"HPCTRAIN_LIFELINE_FD": str(read_fd)}
    with start(run, source, env=env, pass_fds=[read_fd], start_new_session=True) as process:
        os.close(read_fd)
        wait_for_output(run)
        os.close(write_fd)
        assert process.wait(120) == -signal.SIGKILL
        wait_for(lambda: not group_alive(process.pid), 10, "the end of the rank's children")


def group_alive(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False


STOP_SELF = """
import os, signal, sys, time
told = []
def stop():
    os.kill(os.getpid(), signal.SIGTERM)
    while not told:
        time.sleep(0.01)
"""

SURVIVE_STOP = """
from hpctrain.runtime.stopping import signal_recorder
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
signal_recorder.STOP_TIMEOUT_S = signal_recorder.STOP_MARGIN_S = 0.0
stop()
"""


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: told.append(1)); stop()", 75),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); stop()", 75),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); stop()", 75),
        ("signal.signal(signal.SIGTERM, lambda *_: told.append(1)); stop(); raise ValueError", 1),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); told = [1]; stop()", 0),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL); stop()", -signal.SIGTERM),
        # A handler that also calls the previous one decides itself when to exit.
        (
            (
                "before = signal.getsignal(signal.SIGTERM)\n"
                "signal.signal(signal.SIGTERM, lambda *a: (told.append(1), before(*a)))\n"
                "stop(); print('it went on')"
            ),
            75,
        ),
        (f"{SURVIVE_STOP}sys.exit(3)", 3),
        (f"{SURVIVE_STOP}sys.exit(0)", 75),
    ],
    ids=[
        *("runs to its end", "exits in its handler", "fails", "raises", "ignores", "dies", "passes it on"),
        *("fails later", "is complete later"),
    ],
)
def test_stopped_script_is_complete_only_if_it_ignored_the_signal(run, rest, code):
    """Exit codes are part of the stop; if the script was complete, the next attempt ends at once."""
    assert start(run, STOP_SELF + rest).wait(120) == code
    assert ("which counts as a stop, not as the end of the run" in log(run)) is (code == 75)
    assert ("it went on" in log(run)) is ("it went on" in rest)
    assert run.failure(4, 1).exists() is (code in (1, 3))


@pytest.mark.parametrize(("is_signalled", "code"), [(True, 75), (False, 143)])
def test_command_that_a_signal_reaches_before_its_rank_is_continued(run, tmp_path, is_signalled, code):
    process = start_program(run, "command", "sh", "-c", f"touch {tmp_path}/over; kill $$")
    wait_for((tmp_path / "over").exists, 30, "the command")
    if is_signalled:
        time.sleep(0.2)
        process.terminate()
    assert process.wait(120) == code


def test_child_ended_by_sigterm_does_not_stop_the_rank(run):
    source = """
import multiprocessing
for method in ("fork", "spawn"):
    if __name__ == "__main__":
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(pool.map(abs, [-1, 2]))
"""
    assert start(run, source).wait(120) == 0
    assert log(run).count("[1, 2]") == 2


@pytest.mark.parametrize(
    ("ends", "printed"), [("after all", 99), pytest.param("early", 1, marks=pytest.mark.extended)]
)
def test_loader_workers_ignore_signals_of_the_job_and_end_with_their_rank(run, ends, printed):
    source = f"""
import os, signal, time
from torch.utils.data import DataLoader
received = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: received.append(number))
batches = iter(DataLoader(range(100), num_workers=2, multiprocessing_context="fork"))
next(batches)
print("ready")
while len(received) < 2:
    time.sleep(0.01)
time.sleep(0.5)
print(sum(len(batch) for batch in batches) if "{ends}" == "after all" else len(next(batches)), "read")
"""
    process = start(run, source, start_new_session=True)
    try:
        wait_for_output(run, "ready")
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.killpg(process.pid, number)
        assert process.wait(120) == 75, log(run)
        assert f"ready\n{printed} read" in log(run)
        wait_for(lambda: not group_alive(process.pid), 10, "the end of the workers")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


HANDLER = """
import os, signal, sys, time
from hpctrain.runtime.stopping import signal_recorder
signal_recorder.STUCK_HANDLER_TIMEOUT_S, signal_recorder.HANDLER_POLL_S = 0.5, 0.05
names = {"__name__": "torch.distributed.fake", "time": time}
exec("def broadcast(): time.sleep(300)", names)
signal.signal(signal.SIGTERM, HANDLER)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("handler", "messages"),
    [
        # Like Lightning's, which broadcasts while another rank is in another collective.
        ("names['broadcast']()", ["handler has been waiting for other ranks", "in broadcast"]),
        ("(time.sleep(2), print('saved'), sys.exit(0))", ["saved"]),
    ],
    ids=["waits forever", "saves slowly"],
)
def test_handler_is_abandoned_only_if_it_waits_for_other_ranks_forever(run, handler, messages):
    assert start(run, HANDLER.replace("HANDLER)", f"lambda *_: {handler})")).wait(120) == 75
    assert [message in log(run) for message in messages] == [True] * len(messages)
