import signal
from pathlib import Path

import pytest

from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.records.crash_output import find_crash_output, fold, useful_lines
from hpctrain.supervisor.failures.root_cause import RankFailure, classify

IMPORT = """Traceback (most recent call last):
  File "worker.py", line 12, in <module>
    import json
{}: {}
"""


@pytest.fixture
def logs(tmp_path):
    """The path of a process's log, which does not exist yet, the log of its parent, and the latter's size."""
    outer = tmp_path / "slurm.log"
    outer.write_text(IMPORT.format("ValueError", "of an earlier attempt"))
    return tmp_path / "rank.log", outer, outer.stat().st_size


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_newest_traceback_in_the_parents_log_counts_without_an_own_log(logs):
    append(logs[1], IMPORT.format("KeyError", "'x'"))
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    append(logs[1], during + IMPORT.format("my.own.Error", "no such thing") + "srun: error: task 0: Exited\n")
    crash = find_crash_output(*logs)
    assert (crash.log, crash.message) == (logs[1], "my.own.Error: no such thing")
    assert crash.traceback == IMPORT.format("my.own.Error", "no such thing")


def test_interleaved_output_of_several_processes_is_parsed(logs):
    append(logs[1], "".join(line * 2 for line in IMPORT.format("ImportError", "shadowed").splitlines(True)))
    assert find_crash_output(*logs).message == "ImportError: shadowed"


def test_output_of_an_earlier_attempt_is_ignored(logs):
    assert find_crash_output(*logs).traceback == ""
    append(logs[1], "srun: error: n1: task 0: Exited with exit code 1\n")
    crash = find_crash_output(*logs)
    assert (crash.log, crash.message, crash.traceback) == (logs[1], "", "")


def test_empty_own_log_is_not_named_if_the_parents_log_has_output(logs):
    logs[0].touch()
    assert find_crash_output(*logs).log == logs[0]
    append(logs[1], "srun: error: n1: task 0: Killed\n" + IMPORT.format("ImportError", "of a peer"))
    crash = find_crash_output(*logs, signal.SIGSEGV)
    assert (crash.log, crash.message) == (logs[1], "")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "sh: python: not found\nsrun: error: n1: tasks 2-3: Exited with exit code 127\n",
            "sh: python: not found",
        ),
        ("a\nsrun: error: n1: task 0: Killed\nslurmstepd: error: *** STEP 3.0 ON n1 CANCELLED\n", "a"),
        (
            "a\nsrun: error: Unable to create step: Invalid node\n",
            "srun: error: Unable to create step: Invalid node",
        ),
        (
            "srun: error: n1: task 0: Exited with exit code 1\n",
            "srun: error: n1: task 0: Exited with exit code 1",
        ),
    ],
)
def test_last_line_of_the_program_is_the_cause_not_the_report_of_its_end(logs, output, message):
    append(logs[0], output)
    assert find_crash_output(*logs).message == message


@pytest.mark.parametrize(("number", "is_explained"), [(signal.SIGKILL, True), (signal.SIGABRT, False)])
def test_possible_senders_of_a_kill_are_named(logs, number, is_explained):
    logs[0].write_text("here\n")
    message = find_crash_output(*logs, number).message
    assert ("kill -9" in message, "memory" in message) == (is_explained, is_explained)


#: An abort in a collective of gloo, as printed by C++, PyTorch and Python 3.14.
ABORT = """Received SIGTERM: 15
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /pytorch/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4
Exception raised from read at pair.cc:446 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9c (0x7f66 in libc10.so)
Fatal Python error: Aborted

Current thread 0x00007f66 (most recent call first):
  File "train.py", line 12 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/lib/libpython3.so", at _Py_DumpStack+0x50 [0x7f66]
  <truncated rest of calls>

Extension modules: numpy._core, torch._C (total: 117)
"""


def test_reason_of_an_abort_is_found_above_the_native_stack(logs):
    logs[0].write_text(ABORT)
    message = find_crash_output(*logs, signal.SIGABRT).message
    assert message.startswith("[enforce fail at /pytorch/gloo/transport/tcp/pair.cc:446] op.preamble.length")
    failure = RankFailure(1, "n1", "signal", "SIGABRT", message, "rank.log", None, 0.0)
    assert classify(failure) is EndKind.COMMUNICATION


def test_native_stacks_are_not_useful():
    assert useful_lines(ABORT.splitlines()) == [
        "Received SIGTERM: 15",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        ABORT.splitlines()[2],
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x00007f66 (most recent call first):",
        '  File "train.py", line 12 in <module>',
        "",
        "",
    ]


PACKAGE = Path(__file__).parents[1] / "hpctrain"
TORCH = "/opt/lib/python3.12/site-packages/torch"

TRACE = f"""\
Traceback (most recent call last):
  File "/home/me/torch/train.py", line 26, in <module>
    trainer.fit(Line(), data)
  File "{PACKAGE}/training/trainer.py", line 98, in fit
    fit.run()
  File "{TORCH}/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  [Previous line repeated 3 more times]
  File "/home/me/torch/train.py", line 18, in training_step
    table("x")
    ~~~~~^^^^^
KeyError: 'x'
"""


def test_frames_of_hpctrain_and_torch_are_folded():
    assert fold(TRACE).splitlines() == [
        "Traceback (most recent call last):",
        '  File "/home/me/torch/train.py", line 26, in <module>',
        "    trainer.fit(Line(), data)",
        "  … 2 frames of hpctrain and torch",
        '  File "/home/me/torch/train.py", line 18, in training_step',
        '    table("x")',
        "    ~~~~~^^^^^",
        "KeyError: 'x'",
    ]


def test_multi_line_message_is_kept():
    message = "ValueError: first\n    second, indented\nthird\n"
    assert fold(TRACE.replace("KeyError: 'x'\n", message)).endswith(message)
