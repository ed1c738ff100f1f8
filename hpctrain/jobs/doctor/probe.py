"""Run external programs for checks, each with a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.errors import HpctrainError

#: Seconds between SIGTERM and SIGKILL.
_KILL_AFTER_S = 2.0


@dataclass
class Finding:
    """A line of the report."""

    topic: str
    name: str
    value: str
    mend: str = ""
    """The remedy, or the consequence for runs."""
    standing: Literal["", "ok", "note", "problem"] = ""
    """A problem prevents jobs from running. By default, a finding with a remedy is a note."""

    def __post_init__(self) -> None:
        self.standing = self.standing or ("note" if self.mend else "ok")


class ProbeFailed(HpctrainError):
    """A probe failed; the message contains the reason. Other probes continue."""


def command_output(argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str:
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except OSError as error:
        raise ProbeFailed(f"cannot run {argv[0]}: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as error:
        for end in (process.terminate, process.kill):
            end()
            # A process that an unresponsive file server blocks may not end.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_KILL_AFTER_S)
                break
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise ProbeFailed(f"no response within {limit_s:g} s") from None
    if process.returncode:
        raise ProbeFailed((err.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return out


def run_python_probe(code: Sequence[str], environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run this interpreter with the arguments `code`, and return the JSON object that it prints last."""
    lines = command_output([sys.executable, *code], environ, limit_s).strip().splitlines()
    try:
        facts = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise ProbeFailed("the output is invalid")
    return facts
