from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.waiting import wait_for
from torch.distributed import TCPStore

from hpctrain.supervisor.launch.rendezvous_store import RendezvousStore


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_store_is_reachable_by_ipv4_and_ipv6(address):
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with RendezvousStore("n1") as rendezvous:
        port = int(rendezvous.variables["MASTER_PORT"])
        socket.create_connection((address, port), timeout=60).close()


def test_store_of_a_single_host_is_not_reachable_by_others():
    with RendezvousStore("127.0.0.1") as rendezvous:
        port = int(rendezvous.variables["MASTER_PORT"])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=60)


@pytest.mark.slow
def test_store_on_demand_answers_the_first_connection():
    with RendezvousStore("127.0.0.1", on_demand=True) as rendezvous:
        rendezvous.serve()
        assert not rendezvous.was_used()
        client = TCPStore("127.0.0.1", int(rendezvous.variables["MASTER_PORT"]), is_master=False)
        client.set("key", "value")
        wait_for(rendezvous.was_used, 10, "the key in the store")


@pytest.mark.extended
@pytest.mark.ranks
def test_supervisor_of_a_single_rank_does_not_import_torch(tmp_path: Path):
    """Unless the rank forms a process group, which takes a store."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "maps = lambda: open(f'/proc/{os.getppid()}/maps').read()\n"
        "assert 'python' in maps() and 'libtorch' not in maps()\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "assert 'libtorch' in maps()\n"
    )
    submit = [sys.executable, "-m", "hpctrain", "submit", "--backend", "local", "--follow", script]
    run_command(submit, cwd=tmp_path)


@pytest.mark.extended
@pytest.mark.slow
def test_low_limit_of_open_files_is_raised(tmp_path: Path):
    script = tmp_path / "limit.py"
    script.write_text("import resource; print('soft limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    submit = f"{sys.executable} -m hpctrain submit --backend local --ntasks-per-node 2 --follow {script}"
    result = run_command(["bash", "-c", f"ulimit -Sn 50; {submit}"], cwd=tmp_path)
    limit = int(result.stdout.split("soft limit ")[1].split()[0])
    assert limit >= 64
