"""Trains through the same faults with several tools, on a real Slurm cluster, and scores each.

    python benchmarks/faults/run.py [--tools NAME ...] [--faults NAME ...] [--json FILE] [--remark TEXT]

Starts a sandbox of two nodes (requires root and Slurm's packages, as `hpctrain sandbox up`). Each tool trains
the same model on two nodes with a rank each: 120 steps of 0.1 s, with a checkpoint every ten steps. A fault
occurs after step 25. If a job makes no progress for a minute, or ends without a result, a user would act: the
benchmark cancels the job and submits it again, and counts these steps.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpctrain import sandbox
from hpctrain.files import read_json_lines

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from run_all import describe_machine  # noqa: E402
from training import GLOBAL_BATCH, NUM_SAMPLES, NUM_STEPS  # noqa: E402

#: Step after which a fault occurs.
FAULT_STEP = 25
#: Time without progress after which a user acts, and time after which the tool has failed.
PATIENCE_S, LIMIT_S = 60.0, 420.0
#: Time for which the disk stays full.
FULL_DISK_S = 6.0
MAX_ACTIONS = 6


@dataclass
class Tool:
    """A way to run the training."""

    name: str
    submit: Callable[[Job, int], object]
    """Submits the job to a number of nodes."""
    resubmit_steps: int = 1
    """Commands to continue a job that has ended."""


@dataclass
class Score:
    """Result of a tool under a fault."""

    tool: str
    fault: str
    seconds: float | None
    """Time from submission to the result, or None if there was no result."""
    extra_seconds: float | None = None
    """Difference to the undisturbed training."""
    steps_repeated: int = 0
    samples_lost: int = 0
    samples_repeated: int = 0
    equal: bool = False
    """True if the parameters are bitwise those of the undisturbed training."""
    distance: float | None = None
    """Largest absolute difference of the parameters from those of the undisturbed training."""
    manual_steps: int = 0


class Job:
    """A training with one tool, in one folder."""

    def __init__(self, tool: Tool, folder: Path, cluster: sandbox.Sandbox) -> None:
        self.tool, self.folder, self.cluster, self.manual_steps = tool, folder, cluster, 0
        self.disk = folder / "disk"
        (self.disk / "checkpoints").mkdir(parents=True)
        self.env = {
            **os.environ,
            **cluster.env,
            "FAULTS_FOLDER": str(folder),
            "PYTHONPATH": f"{FOLDER}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.lighthouse: subprocess.Popen[bytes] | None = None
        self.begun = time.time()
        tool.submit(self, 2)

    def call(self, *command: str, check: bool = True) -> str:
        for _ in range(3):
            done = subprocess.run(
                command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120
            )
            if not check or not done.returncode:
                return done.stdout
            time.sleep(1)  # A busy controller closes connections.
        output = done.stdout + done.stderr
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{output}")

    def steps(self) -> list[dict[str, Any]]:
        return list(read_json_lines(self.folder / "steps.jsonl"))

    def result(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def is_active(self) -> bool:
        """Return true if Slurm has a job of this training."""
        return bool(self.call("squeue", "--noheader", "--name", self.folder.name, "--format=%i").split())

    def stop_lighthouse(self) -> None:
        """Stop the process that only torchft uses."""
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()

    def cancel(self) -> None:
        for job_id in self.call("squeue", "--noheader", "--name", self.folder.name, "--format=%i").split():
            self.call("scancel", job_id, check=False)
        wait_until(lambda: not self.is_active(), 90, "end of the cancelled job")

    def act_as_user(self, nodes: int = 2) -> None:
        """Cancel the job if it is still there, and submit it again."""
        if self.is_active():
            self.cancel()
            self.manual_steps += 1
        self.manual_steps += self.tool.resubmit_steps
        self.tool.submit(self, nodes)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: any(each["step"] >= step for each in self.steps()), 120, f"step {step}")

    def pid(self, rank: int) -> int:
        return [each["pid"] for each in self.steps() if each["rank"] == rank][-1]

    def finish(self) -> None:
        """Wait for the result, and act like a user if there is no progress."""
        last, changed_at = -1, time.monotonic()
        while self.result() is None and time.time() - self.begun < LIMIT_S:
            time.sleep(0.5)
            count = len(self.steps())
            if count != last:
                last, changed_at = count, time.monotonic()
            waiting_in_queue = "PENDING" in self.call(
                "squeue", "--noheader", "--name", self.folder.name, "--format=%T"
            )
            stuck = time.monotonic() - changed_at > PATIENCE_S and not waiting_in_queue
            gone = time.monotonic() - changed_at > 5 and not self.is_active() and self.result() is None
            if (stuck or gone) and self.manual_steps < MAX_ACTIONS:
                self.act_as_user()
                changed_at = time.monotonic()
        self.cancel()
        self.stop_lighthouse()


def wait_until(condition: Callable[[], bool], limit_s: float, name: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {name} after {limit_s:g} s")
        time.sleep(0.1)


# Tools


def sbatch(job: Job, nodes: int, command: str) -> str:
    script = f"""#!/bin/bash
#SBATCH --job-name={job.folder.name} --nodes={nodes} --ntasks-per-node=1 --cpus-per-task=1
#SBATCH --requeue --open-mode=append --output={job.folder}/job.log --signal=SIGUSR1@20 --time=30
{command}
"""
    (job.folder / "job.sh").write_text(script)
    return job.call("sbatch", "--parsable", str(job.folder / "job.sh")).strip()


def submit_torchrun(job: Job, nodes: int) -> str:
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 --max-restarts=3"
    )
    endpoint = "127.0.0.1:$((20000 + SLURM_JOB_ID % 9999))"
    rendezvous = f"--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint={endpoint}"
    return sbatch(job, nodes, f"srun {torchrun} {rendezvous} {FOLDER}/with_torchrun.py")


def submit_lightning(job: Job, nodes: int) -> str:
    return sbatch(job, nodes, f"srun {sys.executable} {FOLDER}/with_lightning.py")


def submit_submitit(job: Job, nodes: int) -> str:
    words = [sys.executable, f"{FOLDER}/with_submitit.py", str(nodes), str(job.folder), job.folder.name]
    return job.call(*words).strip()


def submit_hpctrain(job: Job, nodes: int) -> str:
    options = ["--nodes", str(nodes), "--ntasks-per-node", "1", "--cpus-per-task", "1", "--time", "30"]
    options += ["--name", job.folder.name, "--run-dir", str(job.disk / "run"), "--no-code-snapshot"]
    job.call(
        sys.executable,
        "-m",
        "hpctrain",
        "submit",
        *options,
        "--hang-timeout",
        "20",
        f"{FOLDER}/with_hpctrain.py",
    )
    return ""


def submit_torchft(job: Job, nodes: int) -> str:
    """Submit a job per replica. The lighthouse of all replicas runs on the login node."""
    job.stop_lighthouse()
    port = 20_000 + os.getpid() % 9000
    flags = ["--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--join_timeout_ms", "3000"]
    job.lighthouse = subprocess.Popen(
        [sys.executable, f"{FOLDER}/torchft_lighthouse.py", *flags],
        env=job.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    variables = f"TORCHFT_LIGHTHOUSE=http://127.0.0.1:{port} NUM_REPLICAS={nodes}"
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node=1 --max-restarts=3"
    for replica in range(nodes):
        rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port + 1 + replica}"
        command = f"{torchrun} {rendezvous} {FOLDER}/with_torchft.py"
        sbatch(job, 1, f"export REPLICA={replica} {variables}\nsrun {command}")
    return ""


TOOLS = [
    Tool("hpctrain", submit_hpctrain),
    Tool("torchrun with sbatch --requeue", submit_torchrun),
    Tool("Lightning", submit_lightning),
    Tool("submitit", submit_submitit),
    Tool("torchft", submit_torchft),
]


# Faults


def no_fault(job: Job) -> None:
    """Nothing happens."""


def kill_rank(job: Job) -> None:
    """SIGKILL of rank 1."""
    os.kill(job.pid(1), signal.SIGKILL)


def hang(job: Job) -> None:
    """SIGSTOP of rank 1."""
    os.kill(job.pid(1), signal.SIGSTOP)


def kill_node(job: Job) -> None:
    """Power failure of the second node, which returns after 20 seconds."""
    node = job.cluster.nodes[1]
    job.cluster.kill_node(node)
    time.sleep(20)
    job.cluster.start_node(node)


def preempt(job: Job) -> None:
    """An urgent job takes both nodes for five seconds."""
    job.call(
        "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"
    )


def fill_disk(job: Job) -> None:
    """The disk of the checkpoints is full for some seconds."""
    filler = job.disk / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(2**20))
            file.flush()
    time.sleep(FULL_DISK_S)
    filler.unlink()


def resize(job: Job) -> None:
    """The user continues on one node."""
    job.act_as_user(nodes=1)


FAULTS: dict[str, Callable[[Job], None]] = {
    "none": no_fault,
    "kill a rank": kill_rank,
    "kill a node": kill_node,
    "hang": hang,
    "preempt": preempt,
    "full disk": fill_disk,
    "resize": resize,
}


def run(
    tool: Tool, fault: str, folder: Path, cluster: sandbox.Sandbox
) -> tuple[Score, dict[str, Any] | None]:
    """Train with a tool, with a fault, and score the result."""
    if fault == "full disk":
        disk = folder / "disk"
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    try:
        job = Job(tool, folder, cluster)
        try:
            if fault != "none":
                job.wait_for_step(FAULT_STEP)
                FAULTS[fault](job)
            job.finish()
        except TimeoutError as error:
            print(f"{tool.name}, {fault}: {error}", file=sys.stderr)
            job.cancel()
        result = job.result()
        seconds = None if result is None else result["time"] - job.begun
        return score(tool.name, fault, job.steps(), seconds, job.manual_steps), result
    finally:
        if fault == "full disk":
            subprocess.run(["umount", "--lazy", str(folder / "disk")], check=True)


def score(tool: str, fault: str, steps: list[dict[str, Any]], seconds: float | None, manual: int) -> Score:
    """Compare the steps that determined the result with two complete epochs."""
    # The last record of a step and rank counts. Ranks of a larger job may be left from before.
    final: dict[int, dict[int, list[int]]] = {}
    repeated = 0
    for each in steps:
        ranks = final.setdefault(each["step"], {})
        repeated += each["rank"] == 0 and 0 in ranks
        ranks[each["rank"]] = each["samples"]
    counts: collections.Counter[int] = collections.Counter()
    for ranks in final.values():
        world_size = GLOBAL_BATCH // len(ranks.get(0, [0]))
        for rank in range(world_size):
            counts.update(ranks.get(rank, []))
    epochs = NUM_STEPS * GLOBAL_BATCH // NUM_SAMPLES
    lost = sum(max(0, epochs - counts[sample]) for sample in range(NUM_SAMPLES))
    more = sum(max(0, counts[sample] - epochs) for sample in range(NUM_SAMPLES))
    return Score(tool, fault, seconds, None, repeated, lost, more, manual_steps=manual)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", default=[tool.name for tool in TOOLS])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--remark", default="", help="a remark about the circumstances, for the page")
    options = parser.parse_args()
    scores: list[Score] = []
    cluster = sandbox.up(f"faults-{os.getpid() % 100_000}", nodes=2, gpus_per_node=0)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for tool in TOOLS:
                if tool.name not in options.tools:
                    continue
                if tool.name == "torchft" and not find_spec("torchft"):
                    print("torchft is not installed: pip install --no-deps torchft", file=sys.stderr)
                    continue
                undisturbed: tuple[Score, dict[str, Any] | None] | None = None
                for fault in ["none", *(each for each in options.faults if each != "none")]:
                    name = f"{tool.name.split()[0]}-{fault.replace(' ', '-')}".lower()
                    measured, result = run(tool, fault, Path(scratch, name), cluster)
                    undisturbed = undisturbed or (measured, result)
                    compare(measured, result, *undisturbed)
                    scores.append(measured)
                    print(json.dumps(asdict(measured)), flush=True)
    finally:
        cluster.down()
    if options.json is not None:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{describe_machine()}, load {os.getloadavg()[2]:.1f}",
            "remark": options.remark,
            "faults": {name: fault.__doc__ for name, fault in FAULTS.items()},
            "scores": [asdict(each) for each in scores],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def compare(score: Score, result: Any, undisturbed: Score, reference: Any) -> None:
    """Compare a result with the undisturbed one of the same tool."""
    if result is None or reference is None:
        return
    score.equal = result["digest"] == reference["digest"]
    pairs = zip(result["parameters"], reference["parameters"], strict=True)
    score.distance = max(abs(own - other) for own, other in pairs)
    if score.seconds is not None and undisturbed.seconds is not None:
        score.extra_seconds = score.seconds - undisturbed.seconds


if __name__ == "__main__":
    main()
