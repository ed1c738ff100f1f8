"""torchrun agents with a rendezvous on a real etcd server: same checkpoints, same restarts."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from helpers.fork_server import free_port
from helpers.training_runs import LAST_STEP, RUN_LIMIT_S, assert_undisturbed, submit
from helpers.waiting import wait_for

SHAPE = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "2"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shutil.which("etcd"), reason="needs Debian's etcd-server"),
    pytest.mark.skipif(find_spec("etcd") is None, reason="needs the package python-etcd"),
]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory) -> Iterator[str]:
    """An etcd server with version 2 of its API."""
    folder = tmp_path_factory.mktemp("etcd")
    port = free_port()
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    command = ["etcd", "--enable-v2", "--name=test", f"--data-dir={folder / 'data'}"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=test={peer}"]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: is_listening(port), 60, "etcd")
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(120)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("backend", ["etcd-v2", "etcd"])
def test_run_with_etcd_rendezvous_resumes_from_the_same_checkpoints(endpoint, reference, tmp_path, backend):
    launcher = ["--launcher", "torchrun", f"--set=rdzv_backend={backend}", f"--set=rdzv_endpoint={endpoint}"]
    run = submit(tmp_path / "run", {}, SHAPE, options=launcher, step_s=0.2)
    run.wait_for_step(8)
    run.hpctrain("requeue", str(run.path), timeout=120)
    wait_for(lambda: len(run.events("started")) == 2, RUN_LIMIT_S, "the second start")
    assert run.wait() == 0
    assert run.events("resumed")[0]["step"] == run.events("signal")[0]["step"] < LAST_STEP
    assert run.events("failure") == []
    assert_undisturbed(run, reference(4))
