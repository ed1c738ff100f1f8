"""Another user of the node attacks a run: no code of theirs runs, and the run completes."""

import os
import subprocess
import sys

import pytest
from helpers import SCRIPTS
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import Run, submit_script
from helpers.waiting import wait_for

SHAPE = ["--backend=local", "--nodes=2", "--ntasks-per-node=1", "--set=node_check=never"]


def store_port(run: Run) -> int:
    """Return the port of the ranks' store as soon as a rank has started."""
    ports = lambda: [process.environ.get("MASTER_PORT") for process in run_processes(run.path)]  # noqa: E731
    return int(wait_for(lambda: next(filter(None, ports()), None), 60, "a rank", 0.01))


@pytest.mark.extended
def test_attacker_in_the_store_of_the_ranks_runs_no_code_and_the_run_completes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evil")
    evil, attacked = folder / "evil", folder / "attacked"
    folder.chmod(0o777)
    environ = {"PATH": os.environ["PATH"], "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    attack = [sys.executable, SCRIPTS / "attack_ranks.py", evil]
    # A process of the user `nobody`, if this one may start any.
    with subprocess.Popen(attack, **pipes, text=True, cwd="/", env=environ) as attacker:
        assert attacker.stdout.readline() == "ready\n"
        options = [*SHAPE, f"--env=ATTACKED={attacked}"]
        script = SCRIPTS / "train_classifier.py"
        run = submit_script(tmp_path_factory.mktemp("run"), script, "--epochs=1", options=options)
        attacker.stdin.write(f"{store_port(run)}\n")
        attacker.stdin.flush()
        assert attacker.stdout.readline() == "sent\n"
        attacked.touch()
        assert run.wait() == 0
        attacker.kill()
    assert not evil.exists()
    assert run.events("finished")[0]["state"] == "COMPLETED"
    (failure,) = (failure for failure in run.events("failure") if "'answer'" in failure["cause"])
    assert failure["class"] == "communication"
    assert "another program changed it" in failure["cause"]
    assert "store at 127.0.0.1:" in failure["cause"]
    assert_no_process_left(run.path)
