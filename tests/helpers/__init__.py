"""Helpers of several test modules."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

#: The programs that tests start.
SCRIPTS = REPOSITORY / "tests" / "scripts"
