"""Programs that a look needs, each with a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpctrain.errors import HpctrainError

#: How long a program that was told to end may tidy up.
_PATIENCE_S = 2.0


class LookFailed(HpctrainError):
    """A look came to nothing; the message says why, and the other looks go on."""


def output(argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str:
    """What a program prints.

    Raises:
        LookFailed: it is missing, failed or took too long.
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
        raise LookFailed(f"{argv[0]} cannot be run: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as error:
        _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise LookFailed(f"no answer within {limit_s:g} s") from None
    if process.returncode:
        last = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise LookFailed(last[0])
    return out


def python_facts(code: Sequence[str], environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """The JSON object that a Python process prints last, run with our own interpreter.

    Args:
        code: arguments of the interpreter.
        environ: its variables.
        limit_s: seconds after which it is given up.

    Raises:
        LookFailed: it failed, took too long, or printed something else.
    """
    lines = output([sys.executable, *code], environ, limit_s).strip().splitlines()
    try:
        facts = json.loads(lines[-1])
    except (IndexError, ValueError):
        facts = None
    if not isinstance(facts, dict):
        raise LookFailed("the answer cannot be read")
    return facts


def _end(process: subprocess.Popen[str]) -> None:
    """Tell the process to end, then make it. One that a dead file server holds is not waited for."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_PATIENCE_S)
        return
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_PATIENCE_S)
