"""Runs of plain batch scripts: a folder with events and a real job, but no supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.commands import run_command
from hpctrain.jobs.runs.run import Run
from hpctrain.rundir import RunDir
from hpctrain.sandbox import Sandbox

#: A function for scripts: it records the run's end, as a supervisor does, after the submission's event.
_END = """
finish() {
    until [ -s events.jsonl ]; do sleep 0.05; done
    printf '{"time": %s, "attempt": 0, "kind": "finished", "state": "%s"}\\n' $(date +%s) $1 >>events.jsonl
}
"""


@dataclass(frozen=True)
class SlurmJobs:
    box: Sandbox
    environ: Mapping[str, str]

    def command(self, *argv: str) -> str:
        return run_command(argv, self.environ).stdout.strip()

    def sbatch(self, folder: Path, script: str, *options: str) -> str:
        """Submit a script that runs in `folder`; return the job's id."""
        folder.mkdir(exist_ok=True)
        path = folder / "job.sbatch"
        path.write_text(f"#!/bin/bash\n{_END}\n{script}\n")
        options_of_folder = (f"--chdir={folder}", "--output=slurm.log", "--open-mode=append")
        return self.command("sbatch", "--parsable", *options_of_folder, *options, str(path))

    def submit(self, folder: Path, script: str, *options: str) -> Run:
        job_id = self.sbatch(folder, script, *options)
        return self.record(folder, job_id)

    def record(self, folder: Path, job_id: str) -> Run:
        folder.mkdir(exist_ok=True)
        run = RunDir(folder)
        run.log_event("submitted", 0, job_id=job_id, backend="slurm")
        return Run(run, self.environ)
