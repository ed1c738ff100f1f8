"""`--dependency`, which accepts runs as well as jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.jobs.options.spec_builder import RUNS_FOLDER
from hpctrain.jobs.runs.run import find_run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.text import suggest

_ANY_END = tuple(state for state in RunState if state.ended)
#: Kinds of sbatch(1) and the final states of a run that satisfy each; None if no state does.
_FULFILLED_BY = {
    "after": _ANY_END,
    "afterany": _ANY_END,
    "afterburstbuffer": None,
    "aftercorr": (RunState.COMPLETED, RunState.STOPPED_EARLY),
    "afternotok": (RunState.FAILED, RunState.CANCELLED),
    "afterok": (RunState.COMPLETED, RunState.STOPPED_EARLY),
    "expand": None,
    "singleton": None,
}
_JOB = re.compile(r"\d+(_\d+|_\*)?(\+\d+)?", re.ASCII)
#: A run, and the optional delay in minutes that `after` accepts.
_RUN = re.compile(r"(.+?)(\+\d+)?", re.ASCII | re.DOTALL)


def resolve_dependency(
    text: str, cwd: Path, environ: Mapping[str, str], runs_dir: str = RUNS_FOLDER
) -> tuple[str, list[str]]:
    """Return the dependency with runs replaced by jobs, and notes for the user."""
    one_suffices = "?" in text
    separator = "?" if one_suffices else ","
    parts: list[str] = []
    notes: list[str] = []
    impossible: list[SpecError] = []
    for part in text.split(separator):
        kind, *names = part.split(":")
        ends = _fulfilled_by(kind, text)
        jobs = []
        for name in names:
            if _JOB.fullmatch(name):
                jobs.append(name)
                continue
            status, delay = _status(f"{kind}:{name}", name, cwd, environ, runs_dir)
            if ends is None or not status.state.ended:
                jobs.append(f"{status.job_id}{delay}")
            elif status.state in ends:
                notes.append(
                    f"--dependency {kind}:{name} has no effect: run {status.run_id} is already "
                    f"{status.state}."
                )
                if one_suffices:
                    return "", notes
            else:
                impossible.append(
                    SpecError(
                        f"--dependency {kind}:{name}: run {status.run_id} is already {status.state}, so the "
                        "job would wait forever. Resume that run first, or remove the dependency."
                    )
                )
        if jobs or not names:
            parts.append(":".join([kind, *jobs]))
    if impossible and not (one_suffices and parts):
        raise impossible[0]
    return separator.join(parts), notes


def _fulfilled_by(kind: str, text: str) -> tuple[RunState, ...] | None:
    if kind in _FULFILLED_BY:
        return _FULFILLED_BY[kind]
    hint = suggest(kind, _FULFILLED_BY)
    raise SpecError(f"--dependency {text!r}: unknown kind of dependency {kind!r}. {hint}")


def _status(
    where: str, name: str, cwd: Path, environ: Mapping[str, str], runs_dir: str
) -> tuple[RunStatus, str]:
    """Return the status of the run of that name, and the delay after the name."""
    match = _RUN.fullmatch(name)
    if match is None:
        raise SpecError(
            f"--dependency {where!r} specifies neither a job nor a run. Use the form KIND:JOB or "
            "KIND:RUN, such as afterok:123."
        )
    folder = os.path.join(cwd, match[1])
    run = folder if os.path.isfile(RunDir(Path(folder)).spec) else match[1]
    status = find_run(run, cwd / runs_dir, environ).status()
    if status.job_id is None:
        raise SpecError(f"--dependency {where}: this run has never been submitted. Submit it first.")
    if status.backend != "slurm":
        raise SpecError(
            f"--dependency {where}: this run uses the local backend, so Slurm jobs cannot depend on "
            "it. Wait for the run with `hpctrain wait`, then submit."
        )
    return status, match[2] or ""
