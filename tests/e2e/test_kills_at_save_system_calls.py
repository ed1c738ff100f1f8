"""SIGKILL to one of two ranks at each system call of a save that changes the run folder.

strace kills the rank on entry to the n-th such call of a thread. Its log names the path of that call, so each
counted kill is known to be inside a save.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.fork_server import start_forked
from helpers.waiting import wait_for

from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = SCRIPTS / "save_every_step.py"
CALLS = ("openat", "write", "fsync", "close", "mkdir", "rename", "unlinkat", "rmdir")
#: A thread's call, as strace logs it with the paths of file descriptors.
_CALL = re.compile(r"(\d+) +(\w+)\((.*)")


class Training:
    """A run of two ranks that is started repeatedly in the same folder."""

    def __init__(self, folder: Path, last_step: int, tier: Path | None = None) -> None:
        self.run, self.last_step, self.starts = RunDir(folder), last_step, 0
        self.env = {"HPCTRAIN_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if tier is not None:
            tier.mkdir()
            self.env["LOCAL_CHECKPOINTS"] = str(tier)
        folder.mkdir()
        #: Paths that a save writes or removes.
        self.saved = re.compile(
            "|".join(re.escape(f"{path}/") for path in (self.run.checkpoints, tier) if path)
        )

    @contextmanager
    def started(self, victim: int = -1, step: int = 0) -> Iterator[list]:
        """Start both ranks, which write to `outputs`; kill them at the end of the block."""
        for name in ("traced", "go"):
            (self.run.path / name).unlink(missing_ok=True)
        args = [str(self.last_step), str(victim), str(step)]
        env = {**self.env, "HPCTRAIN_ATTEMPT": str(self.starts)}
        self.outputs = [self.run.path / f"output-{self.starts}-{rank}" for rank in range(2)]
        self.starts += 1
        ranks = start_forked(SCRIPT, args, env, self.outputs)
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()

    def output(self) -> str:
        return "\n".join(output.read_text() for output in self.outputs if output.exists())

    def train_to_end(self) -> str:
        """Train to the end and return the digest of the weights."""
        with self.started() as ranks:
            for rank in ranks:
                rank.join(120)
            assert [rank.exitcode for rank in ranks] == [0, 0], self.output()
        (digest,) = set(re.findall(r"^weights (\w+)$", self.output(), re.MULTILINE))
        return digest

    def traced(self, victim: int, step: int, trace: str, inject: str | None = None) -> list[str]:
        """Return strace's log from the given step until the victim has ended."""
        log = self.run.path / "calls"
        with self.started(victim, step) as ranks:
            wait_for(
                lambda: (self.run.path / "traced").exists() or ranks[victim].exitcode is not None,
                60,
                "a step",
            )
            pid = (self.run.path / "traced").read_text()
            args = ["strace", "-f", "-y", "-s", "0", "-p", pid, "-o", str(log), "-e", f"trace={trace}"]
            args += ["-e", f"inject={inject}"] if inject else []
            with subprocess.Popen(args, stderr=subprocess.PIPE, text=True) as strace:
                try:
                    if "attached" not in (line := strace.stderr.readline()):
                        pytest.skip(f"strace may not attach here: {line.strip()}")
                    (self.run.path / "go").touch()
                    ranks[victim].join(120)
                    assert ranks[victim].exitcode is not None, self.output()
                    self.exitcode = ranks[victim].exitcode
                    strace.communicate(timeout=120)
                finally:
                    strace.kill()
        return log.read_text().splitlines()

    def kill(self, victim: int, step: int, call: str, n: int) -> bool:
        """Kill a rank at a call and check the checkpoints. Return True if the call was inside a save."""
        before = self.newest()
        lines = self.traced(victim, step, call, f"{call}:signal=SIGKILL:when={n}")
        assert self.exitcode in (0, -signal.SIGKILL), self.output()
        assert self.newest() >= max(before, self.recorded()), f"{call} {n} of rank {victim}"
        return self.exitcode != 0 and any(
            self.saved.search(line) for line in lines if re.search(r"= \?|unfinished", line)
        )

    def newest(self) -> int:
        """Return the step of the newest valid checkpoint; fail if any is corrupt."""
        listed, _ = list_checkpoints(self.run, verify=True)
        assert [checkpoint.problems for checkpoint in listed] == [()] * len(listed), listed
        return max((checkpoint.step for checkpoint in listed), default=0)

    def recorded(self) -> int:
        """Return the last step with a checkpoint event."""
        events = self.run.read_events()
        return max((event["step"] for event in events if event["kind"] == "checkpoint"), default=0)

    def losses(self) -> set[tuple[int, float]]:
        return {(record["step"], record["loss"]) for record in read_json_lines(self.run.metrics)}


def find_calls_of_saves(training: Training) -> list[tuple[int, str, int]]:
    """Return rank, call and n of each n-th call of a thread that is inside a save."""
    calls = set()
    for rank in range(2):
        counts: dict[tuple[str, str], int] = {}
        for line in training.traced(rank, 1, ",".join(CALLS)):
            if (match := _CALL.match(line)) is None or match[2] not in CALLS:
                continue
            key = match[1], match[2]
            counts[key] = counts.get(key, 0) + 1
            if training.saved.search(match[3]):
                calls.add((rank, match[2], counts[key]))
        assert training.exitcode == 0, training.output()
        for folder in (training.run.path, Path(training.env.get("LOCAL_CHECKPOINTS", "/nonexistent"))):
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
                folder.mkdir()
    return sorted(calls, key=lambda each: (each[2], each[1], each[0]))


@pytest.fixture(autouse=True)
def _strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not here")


def check_final_result(training: Training, reference: Training, digest: str) -> None:
    """The run is bitwise the undisturbed one, in each of its attempts."""
    assert training.train_to_end() == digest
    assert training.losses() == reference.losses(), "a step that was trained twice has two losses"
    assert {step for step, _ in training.losses()} == set(range(1, training.last_step + 1))


def test_kill_during_the_commit_of_a_checkpoint(tmp_path):
    reference, training = (Training(tmp_path / name, 4) for name in ("reference", "run"))
    digest = reference.train_to_end()
    assert training.kill(0, 2, "rename", 1)
    check_final_result(training, reference, digest)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("with_tier", [False, True], ids=["shared", "tier"])
def test_kill_at_every_call_of_a_save(tmp_path, with_tier):
    """At least a hundred kills each, at different numbers of checkpoints."""
    last_step, kills, rounds = 40, 0, 0
    reference = Training(tmp_path / "reference", last_step)
    digest = reference.train_to_end()
    probe = Training(tmp_path / "probe", 8, tmp_path / "probe-tier" if with_tier else None)
    moments = find_calls_of_saves(probe)
    runs: list[Training] = []
    while kills < 105 and rounds < 6:
        rounds += 1
        for victim, call, n in moments:
            if not runs or runs[-1].newest() > last_step - 12:
                name = f"run-{len(runs)}"
                runs.append(
                    Training(tmp_path / name, last_step, tmp_path / f"{name}-tier" if with_tier else None)
                )
            kills += runs[-1].kill(victim, rounds, call, n)
    for run in runs:
        check_final_result(run, reference, digest)
    starts = sum(run.starts for run in runs)
    print(f"{kills} kills inside saves in {starts} starts, at {len(moments)} different calls")
    assert kills >= 105
