from __future__ import annotations

import signal

import pytest

from hpctrain.crash_output import find_crash_output

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


def test_lines_of_slurm_are_not_part_of_the_traceback(logs):
    first, *rest = IMPORT.format("ImportError", "shadowed").splitlines(True)
    append(logs[1], "".join([first, "srun: error: n1: task 0: Exited with exit code 1\n", *rest]))
    assert find_crash_output(*logs).traceback == IMPORT.format("ImportError", "shadowed")


def test_output_of_an_earlier_attempt_is_ignored(logs):
    assert find_crash_output(*logs).traceback == ""
    append(logs[1], "srun: error: n1: task 0: Exited with exit code 1\n")
    crash = find_crash_output(*logs)
    assert (crash.log, crash.message, crash.traceback) == (logs[1], "", "")


def test_own_log_with_output_takes_precedence(logs):
    logs[0].write_text("here\n")
    append(logs[1], IMPORT.format("ImportError", "of a peer"))
    crash = find_crash_output(*logs)
    assert (crash.log, crash.message) == (logs[0], "")


def test_empty_own_log_is_not_named_if_the_parents_log_has_output(logs):
    logs[0].touch()
    assert find_crash_output(*logs).log == logs[0]
    append(logs[1], "srun: error: n1: task 0: Killed\n" + IMPORT.format("ImportError", "of a peer"))
    crash = find_crash_output(*logs, signal.SIGSEGV)
    assert (crash.log, crash.message) == (logs[1], "")


@pytest.mark.parametrize(("number", "is_explained"), [(signal.SIGKILL, True), (signal.SIGABRT, False)])
def test_possible_senders_of_a_kill_are_named(logs, number, is_explained):
    logs[0].write_text("here\n")
    message = find_crash_output(*logs, number).message
    assert ("kill -9" in message, "memory" in message) == (is_explained, is_explained)
