"""The CPUs of ranks, from a fake /sys and a fake driver; only the last tests bind real processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fake_gpu_driver import FakeDriver, install_fake_driver
from helpers.node_ranks import ranks

from hpctrain.runtime.cpu_binding import choose_cpus, format_cpus
from hpctrain.telemetry.sampling import nvml

#: Two sockets of four cores with two threads: threads N and N + 8 share a core.
SOCKETS = ("0-3,8-11", "4-7,12-15")
ALL = frozenset(range(16))
#: GPUs 0 and 1 are at the second socket.
BUS_IDS = ["0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0", "0000:d8:00.0"]
WHOLE_NODE = {"SLURM_CPUS_ON_NODE": "16", "OMP_NUM_THREADS": "2"}


@pytest.fixture
def sysfs(tmp_path) -> Path:
    for cpu in ALL:
        path = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for number, bus_id in enumerate(BUS_IDS):
        path = tmp_path / "bus/pci/devices" / bus_id
        path.mkdir(parents=True)
        (path / "local_cpulist").write_text(f"{SOCKETS[number < 2]}\n")
        (path / "numa_node").write_text(f"{int(number < 2)}\n")
    return tmp_path


def chosen(sysfs, count, *, environ=None, allowed=ALL, bus_ids=()) -> list[str | None]:
    """Return the CPUs of each rank of a node; None for a rank that is not bound."""
    bindings = [
        choose_cpus(ranks(rank, count), WHOLE_NODE if environ is None else environ, allowed, bus_ids, sysfs)
        for rank in range(count)
    ]
    return [None if binding is None else format_cpus(binding[0]) for binding in bindings]


def test_ranks_share_the_cores_next_to_their_fake_gpus(sysfs):
    assert chosen(sysfs, 4, bus_ids=BUS_IDS) == ["4-5,12-13", "6-7,14-15", "0-1,8-9", "2-3,10-11"]
    assert chosen(sysfs, 2, bus_ids=BUS_IDS[1:3]) == ["4-7,12-15", "0-3,8-11"]
    _, message = choose_cpus(ranks(0, 4), WHOLE_NODE, ALL, BUS_IDS, sysfs)
    assert message == "bound to CPUs 4-5,12-13, the CPUs closest to GPU 0000:3b:00.0 (NUMA node 1)"


def test_binding_leaves_each_rank_with_fake_gpu_as_many_cpus_as_threads(sysfs):
    def of(threads):
        return chosen(sysfs, 4, bus_ids=BUS_IDS, environ={**WHOLE_NODE, "OMP_NUM_THREADS": str(threads)})

    assert of(4) == ["4-5,12-13", "6-7,14-15", "0-1,8-9", "2-3,10-11"]
    assert of(5) == of(8) == ["4-7,12-15"] * 2 + ["0-3,8-11"] * 2
    assert of(9) == [None] * 4


def test_rank_that_slurm_bound_keeps_its_cpus_with_fake_gpu(sysfs):
    assert chosen(sysfs, 4, bus_ids=BUS_IDS, allowed=frozenset({4, 12})) == [None] * 4


@pytest.mark.parametrize("environ", [{}, {"SLURM_CPUS_ON_NODE": "8"}])
def test_ranks_do_not_divide_cpus_that_other_jobs_may_use_with_fake_gpus(sysfs, environ):
    assert chosen(sysfs, 4, environ=environ, bus_ids=BUS_IDS) == ["4-7,12-15"] * 2 + ["0-3,8-11"] * 2


class TwoGpus(FakeDriver):
    """The fake driver with PCI addresses."""

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [0, 0]

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId={"GPU-a": b"00000000:3B:00.0", "GPU-b": "00000001:AF:00.0"}[handle])


@pytest.mark.parametrize(
    ("visible", "bus_ids"),
    [
        (None, ["0000:3b:00.0", "0001:af:00.0"]),
        ("1,0", ["0001:af:00.0", "0000:3b:00.0"]),
        ("GPU-b", ["0001:af:00.0"]),
        ("", []),
    ],
)
def test_pci_addresses_of_a_fake_driver_follow_the_visible_gpus(monkeypatch, visible, bus_ids):
    install_fake_driver(monkeypatch, TwoGpus())
    assert nvml.list_bus_ids({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == bus_ids


PROGRAM = """
import os, sys, threading
from pathlib import Path
from hpctrain.runtime import cpu_binding

before = threading.Event()
affinity = []
thread = threading.Thread(target=lambda: (before.wait(), affinity.append(os.sched_getaffinity(0))))
thread.start()
own = min(os.sched_getaffinity(0))
cpu_binding.choose_cpus = lambda *_: (frozenset({own}), "bound")
cpu_binding.bind_cpus(None, dict(os.environ))
before.set()
thread.join()
child = os.popen("nproc").read()
print(len(affinity[0]), len(os.sched_getaffinity(0)), child)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(("switch", "count"), [("", "1"), ("none", str(len(os.sched_getaffinity(0))))])
def test_threads_and_children_inherit_the_binding_unless_it_is_off(switch, count):
    environ = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environ, "HPCTRAIN_CPU_BINDING": switch},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == [count] * 3
