"""The first half of a submission: everything is decided and checked, nothing is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.jobs.backends import Backend, choose_backend
from hpctrain.jobs.lint import check_files
from hpctrain.jobs.options import SubmitOptions, build_spec, check_names
from hpctrain.jobs.render import render
from hpctrain.jobs.spec import JobSpec


@dataclass(frozen=True)
class Submission:
    """A job that has passed every check."""

    spec: JobSpec
    #: The batch script, exactly as it will be submitted.
    script: str
    #: What the user should know, a line each.
    notes: tuple[str, ...]
    backend: Backend
    environ: Mapping[str, str]


def prepare(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    python: str,
) -> Submission:
    """Decide and check everything about a job; nothing is written and nothing submitted.

    Raises:
        SpecError: the job cannot be done as asked.
        SchedulerError: Slurm was asked for by name and does not answer.
    """
    check_names(options)
    backend, notes = choose_backend(options.get("backend", "auto"), environ)
    spec = build_spec(script, args, options, backend=backend.name, cwd=cwd, python=python)
    check_files(spec)
    notes += backend.check(spec)
    return Submission(spec, render(spec), tuple(notes), backend, environ)
