"""Run programs undisturbed, preempted, with a killed and with a hung rank, on a sandbox with two nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from programs import EXACTLY, OWN_CHECKPOINT, PROGRAMS, STARTS_OVER, Program

from hpctrain import sandbox
from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
SCENARIOS = ("undisturbed", "preempted", *SIGNALS)
#: Seconds for a run to save its first checkpoint, after which it is disturbed, and to end.
SAVE_LIMIT_S, END_LIMIT_S = 300, 500


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    box = sandbox.up(f"programs-{os.getpid()}", nodes=2, gpus_per_node=0)
    sources = Path(os.environ.get("CONFORMANCE_SOURCES", "/nonexistent"))
    with tempfile.TemporaryDirectory(prefix="hpctrain-programs-") as folder:
        yield Driver(box, Path(folder), sources)
    box.down()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program(driver: Driver, program: Program, scenario: str, record_property) -> None:
    if (source := driver.find_source(program)) is None:
        pytest.skip(f"neither installed nor in CONFORMANCE_SOURCES: {program.source}")
    record_property("version", source[0])
    result = driver.run(program, source[1], scenario)
    if scenario != "undisturbed":
        exactly_or_not = EXACTLY if result == "identical" else OWN_CHECKPOINT
        resumes = exactly_or_not if driver.has_resumed else STARTS_OVER
        record_property("result", resumes)
        assert resumes == program.resumes, f"the final state: {result}"


class Driver:
    """Runs programs in copies of their folders."""

    def __init__(self, box: sandbox.Sandbox, work: Path, sources: Path) -> None:
        self.work, self.sources, self.has_resumed = work, sources, False
        path = f"{Path(sys.executable).parent}:{box.env.get('PATH', os.environ['PATH'])}"
        self.env = {**os.environ, **box.env, "PATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def find_source(self, program: Program) -> tuple[str, Path | None] | None:
        """Return the version of the program, and its folder unless it is a package."""
        with suppress(PackageNotFoundError):
            return version(program.source), None
        folder = self.sources / program.source
        if not folder.is_dir():
            return None
        log = ["git", "-C", str(folder), "log", "-1", "--format=%h"]
        return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip(), folder

    def run(self, program: Program, source: Path | None, scenario: str) -> str:
        """Run a program to its end, and compare its final state with that of the undisturbed run."""
        folder = self.work / program.name / scenario
        self.copy(program, source, folder)
        options = ["--run-dir=run", "--hang-timeout=30", "--standby-workers=never"]
        options.append(f"--checkpoints={program.checkpoints}")
        self.hpctrain(folder, "submit", *options, *program.submit)
        if scenario != "undisturbed":
            self.disturb(program, scenario, folder)
        self.hpctrain(folder, "wait", f"--timeout={END_LIMIT_S}", "run")
        events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
        self.has_resumed = any(event["kind"] == "resumed" and event["attempt"] for event in events)
        assert not run_processes(folder / "run")
        return self.compare(program.result, folder)

    def copy(self, program: Program, source: Path | None, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        prepared = folder.parent / "prepared"
        if not prepared.exists():
            if source is not None:
                shutil.copytree(source, prepared, ignore=shutil.ignore_patterns(".git"))
            prepared.mkdir(parents=True, exist_ok=True)
            program.prepare(prepared)
        shutil.copytree(prepared, folder)
        if program.script:
            header = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=1\n"
            (folder / program.submit[-1]).write_text(f"{header}{program.script}")

    def hpctrain(self, folder: Path, *args: str) -> str:
        command = [sys.executable, "-m", "hpctrain", *args]
        output = {"capture_output": True, "text": True, "timeout": END_LIMIT_S + 60}
        result = subprocess.run(command, cwd=folder, env=self.env, **output)
        assert result.returncode == 0, f"{args}: {result.stdout}{result.stderr}"
        return result.stdout

    def disturb(self, program: Program, scenario: str, folder: Path) -> None:
        """Disturb a run after its first checkpoint."""
        deadline = time.monotonic() + SAVE_LIMIT_S
        while not any(folder.glob(program.checkpoints)):
            assert time.monotonic() < deadline, f"no checkpoint after {SAVE_LIMIT_S} s"
            time.sleep(0.2)
        if scenario == "preempted":
            urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
            subprocess.run([*urgent, "--wrap=sleep 2"], env=self.env, check=True)
        elif program.script:
            # Of the Python processes of the script, launchers use less CPU time.
            pids = [process.pid for process in run_processes(folder / "run") if is_python(process)]
            os.kill(max(pids, key=cpu_ticks), SIGNALS[scenario])
        else:
            fault = {"killed": "kill-rank", "hung": "stop-rank"}[scenario]
            self.hpctrain(folder, "chaos", "run", f"--fault={fault}", "--seed=3")

    def compare(self, pattern: str, folder: Path) -> str:
        tensors, reference = (load(pattern, path) for path in (folder, folder.parent / "undisturbed"))
        if tensors is None or reference is None or tensors.shape != reference.shape:
            return "none" if tensors is None else "not comparable"
        if tensors.allclose(reference, rtol=0, atol=0, equal_nan=True):
            return "identical"
        return f"differs by {(tensors - reference).abs().nan_to_num().max().item():.2g}"


def flatten(value: Any) -> Iterator[Any]:
    """Yield the tensors of a saved object."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value.detach().double().flatten()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from flatten(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)


def load(pattern: str, folder: Path) -> Any:
    """Return the tensors of the newest file that matches."""
    import torch
    from safetensors.torch import load_file

    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not paths:
        return None
    if paths[-1].suffix == ".safetensors":
        saved = load_file(paths[-1])
    else:
        saved = torch.load(paths[-1], map_location="cpu", weights_only=False)
    return torch.cat(list(flatten(saved)))


def run_processes(run: Path) -> list[ProcessInfo]:
    return [process for process in processes() if process.environ.get(RUN_DIR_VARIABLE) == str(run)]


def is_python(process: ProcessInfo) -> bool:
    """True for Python processes that a batch script starts."""
    return ATTEMPT_VARIABLE in process.environ and Path(process.argv[0]).name.startswith("python")


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
