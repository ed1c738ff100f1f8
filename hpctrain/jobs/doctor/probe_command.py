"""External programs for probes, each with a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpctrain.errors import HpctrainError

#: Seconds between SIGTERM and SIGKILL.
_TIMEOUT_S = 2.0


class ProbeFailed(HpctrainError):
    """A probe failed; the message contains the reason. Other probes continue."""


def command_output(argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str:
    """Return the output of a program.

    Raises:
        ProbeFailed: it is missing, failed or timed out.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise ProbeFailed(f"cannot run {argv[0]}: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as error:
        _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise ProbeFailed(f"no response within {limit_s:g} s") from None
    if process.returncode:
        last = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise ProbeFailed(last[0])
    return out


def run_python_probe(code: Sequence[str], environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run a Python process with this interpreter, and return the JSON object that it prints last.

    Args:
        code: arguments of the interpreter.
        environ: its environment.
        limit_s: time limit in seconds.

    Raises:
        ProbeFailed: it failed, timed out, or printed something else.
    """
    lines = command_output([sys.executable, *code], environ, limit_s).strip().splitlines()
    try:
        facts = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise ProbeFailed("the output is invalid")
    return facts


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate the process, then kill it. Do not wait for a process that a dead file server blocks."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_TIMEOUT_S)
        return
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_TIMEOUT_S)
