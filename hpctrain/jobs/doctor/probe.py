"""Run Python code for a check in a process with a time limit, and report the findings of all checks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from hpctrain.errors import HpctrainError
from hpctrain.jobspec.job_spec import GpuRequestStyle
from hpctrain.slurm.site_facts import Site

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


class DoctorReport(Struct, frozen=True):
    findings: tuple[Finding, ...]
    site: Site | None = None
    """The Slurm site; None if there is none."""
    gpu_request_style: GpuRequestStyle | None = None
    """The only accepted way to request GPUs; None if there are others."""

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.standing == "problem"]


class ProbeFailed(HpctrainError):
    """A probe failed; the message contains the reason. Other probes continue."""


def run_python_probe(code: Sequence[str], environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run this interpreter with the arguments `code`, and return the JSON object that it prints last."""
    pipe, argv = subprocess.PIPE, [sys.executable, *code]
    process = subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
    )
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
    try:
        facts = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise ProbeFailed("the output is invalid")
    return facts
