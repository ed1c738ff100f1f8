"""Time of `hpctrain submit`, relative to a program that submits a function with submitit.

    python benchmarks/submit.py [--rounds N] [--torchx PATH]

Starts a sandbox (requires Linux, root and Slurm's packages) with busy nodes, so that all jobs remain pending.
Complete processes are measured, including the interpreter and its imports. The repository has 50 files, which
are copied into the run folder. All variants run alternately, with compiled modules, and none imports torch.
submitit's variant uses its SlurmExecutor, because AutoExecutor imports all plugins, and hpctrain is one. The
CPU time includes child processes. Unlike submitit, hpctrain checks the job, requests the expected start from
Slurm, copies the code, and syncs the specification to disk. The `Executor` extends submitit's classes, and
therefore imports submitit as well.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from results import Results

from hpctrain import sandbox

NUM_FILES = 50

WITH_SUBMITIT = """
import submitit

def add(a, b):
    return a + b

if __name__ == "__main__":
    executor = submitit.SlurmExecutor(folder="logs")
    executor.update_parameters(nodes=1, ntasks_per_node=1, time=5)
    print("job", executor.submit(add, 1, 2).job_id)
"""

WITH_EXECUTOR = """
import hpctrain

def add(a, b):
    return a + b

if __name__ == "__main__":
    executor = hpctrain.Executor(folder="runs", nodes=1, ntasks_per_node=1, time=5)
    print("job", executor.submit(add, 1, 2).job_id)
"""

#: Pattern of the id of the submitted job in the output.
JOB = re.compile(r"\bjob (\d+)|slurm://\w+/(\d+)")


class Submission(NamedTuple):
    """A variant of submitting a job."""

    words: str
    command: list[str]
    folder: Path


class Cost(NamedTuple):
    """Cost of a process, in seconds."""

    wall: float
    cpu: float


def measure(submission: Submission, environ: dict[str, str]) -> Cost:
    """Run the submission once, and cancel the job."""
    before, start = _cpu_of_children(), time.perf_counter()
    done = subprocess.run(
        submission.command, cwd=submission.folder, env=environ, capture_output=True, text=True
    )
    cost = Cost(time.perf_counter() - start, _cpu_of_children() - before)
    # After the submission, torchx queries the state of the job, and fails without accounting.
    if (match := JOB.search(done.stdout)) is None:
        sys.exit(f"{' '.join(submission.command)} printed no job id:\n{done.stdout}{done.stderr}")
    subprocess.run(["scancel", match[1] or match[2]], env=environ, check=True)
    return cost


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def submissions(folder: Path, torchx: str | None) -> list[Submission]:
    """Return all variants, submitit first, and create the required files."""
    plain, repository = folder / "plain", folder / "repository"
    for place in (plain, repository):
        place.mkdir()
        (place / "train.py").write_text("print('hello')\n")
    (plain / "with_submitit.py").write_text(WITH_SUBMITIT)
    (plain / "with_executor.py").write_text(WITH_EXECUTOR)
    for i in range(NUM_FILES - 1):
        (repository / f"module_{i}.py").write_text(f"VALUE = {i}\n" * 100)
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-C", str(repository)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *words], check=True)
    submit = [sys.executable, "-m", "hpctrain", "submit", "--ntasks-per-node", "1", "--time", "5", "train.py"]
    found = [
        Submission("submitit, a function", [sys.executable, "with_submitit.py"], plain),
        Submission("hpctrain submit", submit, plain),
        Submission("hpctrain submit, repository", submit, repository),
        Submission("hpctrain.Executor, a function", [sys.executable, "with_executor.py"], plain),
    ]
    if torchx is not None:
        run = [torchx, "run", "-s", "slurm", "dist.ddp", "-j", "1x1", "--script", "train.py"]
        found.append(Submission("torchx run", run, plain))
    return found


def costs(box: sandbox.Sandbox, rounds: int, torchx: str | None) -> dict[str, list[Cost]]:
    """Return the cost of each submission in each round; a warm-up round is not counted."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        folder = Path(name)
        environ = {
            **os.environ,
            **box.env,
            "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        blocker = ["sbatch", "--exclusive", "--output=/dev/null", "--wrap", "sleep infinity"]
        subprocess.run(blocker, env=environ, check=True, capture_output=True)
        every = submissions(folder, torchx)
        for submission in every:
            measure(submission, environ)
        found: dict[str, list[Cost]] = {submission.words: [] for submission in every}
        for _ in range(rounds):
            for submission in every:
                found[submission.words].append(measure(submission, environ))
        return found


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=21)
    results.parser.add_argument("--torchx", help="path of torchx, if not on PATH", default="torchx")
    options = results.parse()
    box = sandbox.up(f"bench-{os.getpid()}", nodes=1, gpus_per_node=0)
    try:
        found = costs(box, options.rounds, shutil.which(options.torchx))
    finally:
        box.down()
    base, *others = found
    results.add(base, [cost.wall * 1000 for cost in found[base]], "ms")
    for name in others:
        limit = 1.5 if name.startswith("hpctrain submit") else None
        for unit, which in (("× wall time", 0), ("× CPU time", 1)):
            of_base = statistics.median(cost[which] for cost in found[base])
            ratios = [cost[which] / of_base for cost in found[name]]
            results.add(name, ratios, unit, limit=None if which else limit, headline=not which)
    results.finish()


if __name__ == "__main__":
    main()
