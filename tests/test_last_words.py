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
    """A process's own log, which is not there yet, and that of whoever started it."""
    outer = tmp_path / "slurm.log"
    outer.write_text(IMPORT.format("ValueError", "of an earlier attempt"))
    return tmp_path / "rank.log", outer, outer.stat().st_size


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_where_a_process_has_opened_no_log_the_newest_traceback_outside_is_its_own(logs):
    append(logs[1], IMPORT.format("KeyError", "'x'"))
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    append(logs[1], during + IMPORT.format("my.own.Error", "no such thing") + "srun: error: task 0: Exited\n")
    found = find_crash_output(*logs)
    assert (found.log, found.message) == (logs[1], "my.own.Error: no such thing")
    assert found.traceback == IMPORT.format("my.own.Error", "no such thing")


def test_of_processes_that_print_at_once_each_line_is_whole(logs):
    append(logs[1], "".join(line * 2 for line in IMPORT.format("ImportError", "shadowed").splitlines(True)))
    assert find_crash_output(*logs).message == "ImportError: shadowed"


def test_what_slurm_says_in_between_is_no_part_of_it(logs):
    first, *rest = IMPORT.format("ImportError", "shadowed").splitlines(True)
    append(logs[1], "".join([first, "srun: error: n1: task 0: Exited with exit code 1\n", *rest]))
    assert find_crash_output(*logs).traceback == IMPORT.format("ImportError", "shadowed")


def test_what_an_earlier_attempt_said_is_not_quoted(logs):
    assert find_crash_output(*logs).traceback == ""
    append(logs[1], "srun: error: n1: task 0: Exited with exit code 1\n")
    found = find_crash_output(*logs)
    assert (found.log, found.message, found.traceback) == (logs[1], "", "")


def test_a_log_with_words_is_the_one_to_read(logs):
    logs[0].write_text("here\n")
    append(logs[1], IMPORT.format("ImportError", "of a peer"))
    found = find_crash_output(*logs)
    assert (found.log, found.message) == (logs[0], "")


def test_an_empty_log_is_not_named_where_there_are_words_elsewhere(logs):
    logs[0].touch()
    assert find_crash_output(*logs).log == logs[0]
    append(logs[1], "srun: error: n1: task 0: Killed\n" + IMPORT.format("ImportError", "of a peer"))
    found = find_crash_output(*logs, signal.SIGSEGV)
    assert (found.log, found.message) == (logs[1], "")


@pytest.mark.parametrize(("number", "known"), [(signal.SIGKILL, True), (signal.SIGABRT, False)])
def test_whoever_may_have_killed_it_is_named(logs, number, known):
    logs[0].write_text("here\n")
    message = find_crash_output(*logs, number).message
    assert ("kill -9" in message, "memory" in message) == (known, known)
