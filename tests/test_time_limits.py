"""The time limit of a test: it applies to the test alone, and never ends the session."""

from __future__ import annotations

import sys

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command

TESTS = """
import time, pytest

@pytest.fixture
def slow():
    time.sleep(1)

def test_hangs():
    time.sleep(1000)

def test_with_slow_fixture(slow):
    pass
"""
#: A report that takes longer than the limit, as on a busy machine.
SLOW_REPORTS = """
import time
from conftest import *

def pytest_runtest_logreport(report):
    time.sleep(1)
"""


@pytest.mark.slow
def test_hung_test_fails_without_ending_the_session(tmp_path):
    (tmp_path / "test_slow.py").write_text(TESTS)
    (tmp_path / "slow_reports.py").write_text(SLOW_REPORTS)
    argv = [sys.executable, "-m", "pytest", "-c", REPOSITORY / "pyproject.toml", "-p", "slow_reports", "-n1"]
    paths = f"{tmp_path}:{REPOSITORY / 'tests'}:{REPOSITORY}"
    command = [*argv, "-o", "timeout=0.05", tmp_path / "test_slow.py"]
    result = run_command(command, {"PYTHONPATH": paths}, cwd=tmp_path, check=False)
    assert "Failed: Timeout (>0.05s) from pytest-timeout" in result.stdout
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert "INTERNALERROR" not in result.stdout
