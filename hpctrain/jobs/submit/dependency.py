"""Replace runs in `--dependency` with their jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.jobs.runs.run import find_run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.text import suggest

_ANY_END = tuple(state for state in RunState if state.ended)
_SUCCESS = (RunState.COMPLETED, RunState.STOPPED_EARLY)
#: Kinds of sbatch(1) and the final states of a run that satisfy each; None if no state does.
_FULFILLED_BY = {
    "after": _ANY_END,
    "afterany": _ANY_END,
    "afterburstbuffer": None,
    "aftercorr": _SUCCESS,
    "afternotok": (RunState.FAILED, RunState.CANCELLED),
    "afterok": _SUCCESS,
    "expand": None,
    "singleton": None,
}
_JOB = re.compile(r"\d+(_\d+|_\*)?(\+\d+)?", re.ASCII)
#: A run, and the optional delay in minutes that `after` accepts.
_RUN = re.compile(r"(.+?)(\+\d+)?", re.ASCII | re.DOTALL)


def resolve_dependency(
    text: str, cwd: Path, environ: Mapping[str, str], runs_dir: str
) -> tuple[str, list[str]]:
    """Return the dependency with runs replaced by jobs, and notes for the user.

    A run that has ended as required is omitted, because Slurm forgets ended jobs; the result may be empty.
    """
    separator = "?" if "?" in text else ","
    conditions: list[str] = []
    notes: list[str] = []
    impossible: list[str] = []
    for condition in text.split(separator):
        kind, *names = condition.split(":")
        if kind not in _FULFILLED_BY:
            hint = suggest(kind, _FULFILLED_BY)
            raise SpecError(f"--dependency {text!r}: unknown kind of dependency {kind!r}. {hint}")
        states = _FULFILLED_BY[kind]
        jobs = []
        for name in names:
            option = f"--dependency {kind}:{name}"
            if _JOB.fullmatch(name):
                jobs.append(name)
                continue
            status, delay = _find_run(option, name, cwd, environ, runs_dir)
            if states is None or not status.state.ended:
                jobs.append(f"{status.job_id}{delay}")
            elif status.state not in states:
                impossible.append(
                    f"{option}: run {status.run_id} is already {status.state}, so the job would wait "
                    "forever. Resume that run first, or remove the dependency."
                )
            else:
                notes.append(f"{option} has no effect: run {status.run_id} is already {status.state}.")
                if separator == "?":
                    return "", notes
        if jobs or not names:
            conditions.append(":".join([kind, *jobs]))
    if impossible and not (separator == "?" and conditions):
        raise SpecError(impossible[0])
    return separator.join(conditions), notes


def _find_run(
    option: str, name: str, cwd: Path, environ: Mapping[str, str], runs_dir: str
) -> tuple[RunStatus, str]:
    match = _RUN.fullmatch(name)
    if match is None:
        raise SpecError(f"{option} specifies neither a job nor a run. Use KIND:JOB or KIND:RUN.")
    folder = os.path.join(cwd, match[1])
    run = folder if os.path.isfile(RunDir(Path(folder)).spec) else match[1]
    status = find_run(run, cwd / runs_dir, environ).status()
    if status.job_id is None:
        raise SpecError(f"{option}: this run has never been submitted. Submit it first.")
    if status.backend != "slurm":
        raise SpecError(
            f"{option}: this run uses the local backend, so Slurm jobs cannot depend on it. Wait for the run "
            "with `hpctrain wait`, then submit."
        )
    return status, match[2] or ""
