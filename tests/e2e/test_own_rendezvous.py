"""Scripts that choose their own rendezvous, or start processes of their own, run as under plain srun."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from helpers.commands import run_command

from hpctrain.cluster.ports import bind_socket

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

ADD = """
import torch, torch.distributed as dist
def add():
    one = torch.ones(1)
    dist.all_reduce(one)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {one.item():g}", flush=True)
    dist.destroy_process_group()
"""
RANKS = 'rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])'
SCRIPTS = {
    "env": "import add\nadd.dist.init_process_group('gloo')\nadd.add()\n",
    "own MASTER_PORT": f"""
import os, socket, subprocess, sys, add
{RANKS}
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
add.dist.init_process_group("gloo", rank=rank, world_size=world)
add.add()
""",
    "file": f"""
import os, sys, add
{RANKS}
address = f"file://{{sys.argv[2]}}/store"
add.dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
add.add()
""",
}
SPAWN = """
import os, sys, add, torch.multiprocessing as mp
def train(rank, world):
    address = f"tcp://127.0.0.1:{sys.argv[1]}"
    add.dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    add.add()
if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""
NESTED = """
import os, subprocess, sys
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
sys.exit(subprocess.call([*torchrun, f"--master-port={sys.argv[1]}", "env.py"]))
"""


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that no other program can use, but torch's store can. So is the next one."""
    while True:
        with bind_socket() as sock, ExitStack() as stack:
            port = sock.getsockname()[1]
            with suppress(OSError, OverflowError):
                stack.enter_context(bind_socket(port + 1))
                yield port
                return


def follow(folder, script: str, port: int, *options: str) -> str:
    (folder / "add.py").write_text(ADD)
    (folder / "env.py").write_text(SCRIPTS["env"])
    (folder / "train.py").write_text(script)
    submit = [sys.executable, "-m", "hpctrain", "submit", "--backend=local", "--follow", "--run-dir=run"]
    run_command([*submit, *options, folder / "train.py", port, folder], cwd=folder, timeout=300)
    return "".join(path.read_text() for path in sorted((folder / "run/logs/attempt-000").glob("rank-*.log")))


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_ranks_meet_at_the_address_of_the_script(tmp_path, free_port, script):
    output = follow(tmp_path, script, free_port, "--ntasks-per-node", "2")
    assert all(f"rank {rank} of 2: 2" in output for rank in range(2))
    assert "note" not in (tmp_path / "run/events.jsonl").read_text()


@pytest.mark.parametrize("script", [SPAWN, NESTED], ids=["spawn", "torchrun"])
def test_processes_of_a_single_rank_meet(tmp_path, free_port, script):
    output = follow(tmp_path, script, free_port)
    assert all(f"rank {rank} of 2: 2" in output for rank in range(2))


def test_ranks_at_different_addresses_are_reported(tmp_path, free_port):
    (tmp_path / "train.py").write_text(
        "import os, sys, torch.distributed as dist\n"
        "port = int(sys.argv[1]) + int(os.environ['RANK'])\n"
        "rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "url = f'tcp://127.0.0.1:{port}'\n"
        "dist.init_process_group('gloo', init_method=url, rank=rank, world_size=world)\n"
    )
    submit = [sys.executable, "-m", "hpctrain", "submit", "--backend", "local", "--ntasks-per-node", "2"]
    limits = ["--hang-timeout", "25", "--max-failures", "1", "--follow", "--run-dir", "run"]
    result = run_command([*submit, *limits, "train.py", free_port], cwd=tmp_path, check=False, timeout=300)
    assert result.returncode == 4
    addresses = [f"tcp://127.0.0.1:{free_port + rank}" for rank in range(2)]
    assert f"ranks 0-1 waiting for the process group at {' and '.join(addresses)}" in result.stderr
