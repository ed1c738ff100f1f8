import socket
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from torch.distributed import TCPStore

from hpctrain.supervisor.launch.job_step import RendezvousStore


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_store_is_reachable_by_ipv4_and_ipv6(address):
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with RendezvousStore("n1", hosted=True) as rendezvous:
        port = int(rendezvous.variables["MASTER_PORT"])
        socket.create_connection((address, port), timeout=60).close()


def test_store_of_a_single_host_is_not_reachable_by_others():
    with RendezvousStore("127.0.0.1", hosted=True) as rendezvous:
        port = int(rendezvous.variables["MASTER_PORT"])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=60)


def test_port_is_reserved_for_the_store_of_rank_0():
    with RendezvousStore("n1") as rendezvous:
        port = int(rendezvous.variables["MASTER_PORT"])
        rendezvous.serve()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        TCPStore("127.0.0.1", port, is_master=False).set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.extended
@pytest.mark.ranks
def test_supervisor_does_not_import_torch(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "maps = open(f'/proc/{os.getppid()}/maps').read()\n"
        "assert 'python' in maps and 'libtorch' not in maps\n"
    )
    submit = [sys.executable, "-m", "hpctrain", "submit", "--backend", "local", "--ntasks-per-node", "2"]
    run_command([*submit, "--follow", script], cwd=tmp_path)
