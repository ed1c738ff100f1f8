from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command

from hpctrain.supervisor.launch.rendezvous_store import RendezvousStore


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_store_is_reachable_by_ipv4_and_ipv6(address):
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with RendezvousStore("n1") as rendezvous:
        port = int(rendezvous.variables["MASTER_PORT"])
        socket.create_connection((address, port), timeout=5).close()


def test_store_of_a_single_host_is_not_reachable_by_others():
    with RendezvousStore("127.0.0.1") as rendezvous:
        port = int(rendezvous.variables["MASTER_PORT"])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.slow
def test_low_limit_of_open_files_is_raised(tmp_path: Path):
    script = tmp_path / "limit.py"
    script.write_text("import resource; print('soft limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    submit = f"{sys.executable} -m hpctrain submit --backend local --ntasks-per-node 2 --follow {script}"
    result = run_command(["bash", "-c", f"ulimit -Sn 50; {submit}"], cwd=tmp_path)
    limit = int(result.stdout.split("soft limit ")[1].split()[0])
    assert limit >= 64
