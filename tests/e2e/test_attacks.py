"""Another user of the node attacks a run: no code of theirs runs, and the run completes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import JOB, Run
from helpers.waiting import wait_for

from hpctrain.rundir import SUPERVISOR_ADDRESS_VARIABLE

ATTACKER = SCRIPTS / "attack_ranks.py"
SHAPE = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1", "--node-check", "never"]


@contextmanager
def attacker(attack: str, file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of the user `nobody`, if this one may start any."""
    with subprocess.Popen(
        [sys.executable, ATTACKER, attack, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def rank_variable(run: Run, variable: str) -> str:
    """Return a variable of the ranks' environment as soon as one has started."""

    def find() -> str | None:
        return next((p.environ[variable] for p in run_processes(run.path) if variable in p.environ), None)

    return wait_for(find, 60, f"a rank with {variable}", 0.01)


@pytest.mark.parametrize("attack", ["store", "addresses", pytest.param("group", marks=pytest.mark.long)])
def test_attacker_in_place_of_a_rank_runs_no_code_and_the_run_completes(tmp_path_factory, attack):
    folder = tmp_path_factory.mktemp("evil")
    evil = folder / "evil"
    folder.chmod(0o777)
    run = Run(tmp_path_factory.mktemp("run") / "run", {})
    with attacker(attack, evil) as process:
        run.hpctrain("submit", *SHAPE, "--run-dir", str(run.path), str(JOB), "--epochs", "1")
        assert process.stdin is not None
        process.stdin.write(f"{rank_variable(run, 'MASTER_PORT')}\n")
        process.stdin.flush()
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        assert run.wait() == 0
    assert not evil.exists()
    assert run.events("finished")[0]["state"] == "COMPLETED"
    failures = run.events("failure")
    if attack == "store":
        (failure,) = failures
        assert failure["class"] == "unauthenticated"
        assert "was written by a process that does not have the secret of this run" in failure["cause"]
        assert "store at 127.0.0.1:" in failure["cause"]
        if os.geteuid() == 0:
            assert "users connected to it from this node: nobody (uid 65534)" in failure["cause"]
    if attack == "addresses":
        (failure,) = failures
        assert failure["class"] == "unauthenticated"
        assert "the store's entry 'hpctrain/0/0//cpu//0/" in failure["cause"]
    # Either process may win the race for the place in the group.
    assert {failure["class"] for failure in failures} <= {"unauthenticated", "nccl", "signal", "hang"}
    assert_no_process_left(run.path)


@pytest.mark.long
def test_hangs_are_detected_after_a_stranger_connected_to_the_supervisor(tmp_path):
    run = Run(tmp_path / "run", {})
    options = ["--hang-timeout", "3", "--run-dir", str(run.path)]
    job = [str(JOB), "--hang", "loop", "--checkpoint-every", "100", "--epochs", "1"]
    run.hpctrain("submit", *SHAPE, *options, *job)
    address, port, _ = rank_variable(run, SUPERVISOR_ADDRESS_VARIABLE).rsplit(":", 2)
    strangers = []
    for data in (b"[" * 60_000 + b"\n", b"x" * 1_000_000, b'{"token": ', *[b""] * 300):
        connection = socket.create_connection((address, int(port)), timeout=10)
        with suppress(OSError):
            connection.sendall(data)
        strangers.append(connection)
    time.sleep(0.1)
    assert run.wait() == 0
    (failure,) = run.events("failure")
    assert (failure["class"], failure["rank"]) == ("hang", 1)
    assert "was refused: received a line of more than" in run.dir.supervisor_log.read_text()
    for connection in strangers:
        connection.close()
    assert_no_process_left(run.path)
