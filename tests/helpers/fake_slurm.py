"""Fake Slurm commands, for errors that a real Slurm does not produce on demand."""

import os
from pathlib import Path

_SEPARATOR = "\x1f"

INVALID_JOB_ID = "slurm_load_jobs error: Invalid job id specified\n"
UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
NO_ACCOUNTING = "Slurm accounting storage is disabled\n"
CONFIG = "Configuration data as of 2026-11-21T08:00:00\nMinJobAge               = 300 sec\n"


class FakeSlurm:
    """A folder of commands that print configured answers and record their calls.

    Initially the queue is empty, there is no accounting, and the controller knows no job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
        self.answer("sinfo", "4|gpu:2(S:0-1)\n")
        self.answer("sbatch", "17\n")
        self.answer("squeue")
        self.answer("sacct", stderr=NO_ACCOUNTING, code=1)
        self.controller()

    def answer(self, name: str, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(stdout)
        (self.folder / f"{name}.err").write_text(stderr)
        path = self.folder / name
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> "${{0%/*}}/calls"\ncat "$0.out"\ncat "$0.err" >&2\nexit {code}\n'
        )
        path.chmod(0o755)

    def controller(self, jobs: str = "", stderr: str = INVALID_JOB_ID, code: int = 1) -> None:
        """Set the jobs or the error of scontrol; it always answers about its configuration."""
        self.answer("scontrol", jobs, "" if jobs else stderr, 0 if jobs else code)
        script = self.folder / "scontrol"
        config = self.folder / "config"
        config.write_text(CONFIG)
        head, rest = script.read_text().split("\n", 1)
        script.write_text(f'{head}\n[ "$2" != config ] || exec cat {config}\n{rest}')

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def queued(
    job: str,
    state: str,
    restarts: int = 0,
    reason: str = "None",
    *,
    eligible_at: str = "N/A",
    workdir: str = "/home/me/runs/r",
    raw: str = "",
) -> str:
    base, _, task = job.partition("_")
    het_base, _, offset = job.partition("+")
    het = (het_base, offset) if offset else ("N/A", "N/A")
    cells = (het_base if offset else base, task or "N/A", *het, raw or job, state, str(restarts))
    return _SEPARATOR.join((*cells, eligible_at, workdir, reason, "\n"))


def recorded(
    job: str, state: str, *, submit: str = "2026-11-21T08:00:00", workdir: str = "/home/me/runs/r"
) -> str:
    return _SEPARATOR.join((job, job, state, submit, workdir)) + "\n"


def shown(job: str, state: str, *, workdir: str = "/home/me/runs/r", head: str = "") -> str:
    """Return a record of `scontrol show job` with a job name that looks like a state."""
    return (
        f"JobId={job}{head} JobName=x JobState=COMPLETED\n"
        f"   UserId=root(0)\n   JobState={state} Reason=None Dependency=(null)\n"
        "   Requeue=1 Restarts=0 BatchFlag=1\n   SubmitTime=2026-11-21T08:00:00 EligibleTime=Unknown\n"
        f"   WorkDir={workdir}\n\n"
    )
