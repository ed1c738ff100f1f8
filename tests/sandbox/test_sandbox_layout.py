import socket
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import SpecError, UserError
from hpctrain.sandbox.layout import SandboxLayout, SandboxSize, allocate, folder_of, list_names
from hpctrain.sandbox.slurm_conf import gres_conf, slurm_conf
from hpctrain.sandbox.slurm_sandbox import check_requirements

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"]


def _layout(folder: Path, **shape: Any) -> SandboxLayout:
    return SandboxLayout(folder, SandboxSize(**shape), port=26800, block=7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, "number of nodes is 0, but must be between 1 and 64"),
        ({"nodes": 65}, "number of nodes is 65, but must be between 1 and 64"),
        ({"gpus_per_node": -1}, "GPUs per node is -1, but must be between 0 and 16"),
        ({"cpus_per_node": 0}, "CPUs per node is 0, but must be between 1 and 256"),
        ({"preempt_grace_s": -5}, "grace time of preempted jobs in seconds is -5"),
        ({"gpu_type": "a:100"}, "'a:100' is not a valid GPU type"),
        ({"settings": ("JobRequeue",)}, "'JobRequeue' is not a valid slurm.conf line"),
        ({"settings": ("A=b\nC=d",)}, "is not a valid slurm.conf line"),
        ({"settings": ("NodeName=x CPUs=1",)}, "use the other options of this command"),
    ],
)
def test_impossible_sizes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SandboxSize(**fields)


@pytest.mark.parametrize("name", ["", "Big", "a_b", "../x", "a b", "-a", "a-", "1a", "a" * 16, "a\n"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="lower-case letters"):
        folder_of(name)


def test_nodes_ports_and_addresses_belong_together(tmp_path: Path) -> None:
    plan = _layout(tmp_path / "box", nodes=3)
    assert plan.nodes == ["box-1", "box-2", "box-3"]
    assert plan.addresses == {"box-1": "127.26.7.1", "box-2": "127.26.7.2", "box-3": "127.26.7.3"}
    assert list(plan.ports) == [26800, 26801, 26802, 26803, 26804]


def test_longest_path_fits_into_a_unix_socket() -> None:
    plan = _layout(folder_of("a" * 15), nodes=64)
    node = plan.nodes[-1]
    # The socket of slurmstepd for the batch step of a job with Slurm's highest default id.
    socket_path = plan.folder / "spool" / node / f"{node}_67043328.4294967291"
    assert len(str(socket_path)) <= 107
    assert len(str(plan.munge_socket)) <= 107


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"shape": {"nodes": 0}, "port": 1, "block": 1}'])
def test_damaged_layout_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "sandbox.json").write_text(content)
    assert SandboxLayout.load(tmp_path) is None


def test_concurrent_sandboxes_share_no_port_and_no_address(tmp_path: Path) -> None:
    plans = []
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        shape = SandboxSize(nodes=5)
        plan = SandboxLayout(tmp_path / name, shape, *allocate(tmp_path / name, shape))
        plan.save()
        plans.append(plan)
    assert len({port for plan in plans for port in plan.ports}) == 3 * 7
    assert len({address for plan in plans for address in plan.addresses.values()}) == 3 * 5
    assert list_names(tmp_path) == ["one", "three", "two"]


def test_port_in_use_is_not_allocated(tmp_path: Path) -> None:
    port, _ = allocate(tmp_path / "one", SandboxSize(nodes=2))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port + 1))
        listener.listen()
        assert allocate(tmp_path / "one", SandboxSize(nodes=2))[0] > port + 1


def test_config_has_nodes_devices_and_partitions(tmp_path: Path) -> None:
    plan = _layout(tmp_path / "box", preempt_grace_s=12)
    conf = slurm_conf(plan, "here", 4096)
    assert (
        "NodeName=box-[1-4] NodeHostname=here NodeAddr=127.26.7.[1-4] Port=[26801-26804] "
        "CPUs=8 RealMemory=4096 Gres=gpu:2 State=UNKNOWN"
    ) in conf
    assert (
        "PartitionName=preemptible Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=12"
        in conf
    )
    assert f"NodeName=box-[1-4] Name=gpu File={tmp_path}/box/dev/nvidia[0-1]" in gres_conf(plan)


def test_settings_replace_or_add_lines(tmp_path: Path) -> None:
    lines = ("jobrequeue=0", "PartitionName=urgent Nodes=ALL MaxTime=3", "PartitionName=urgently Nodes=ALL")
    plan = _layout(tmp_path / "box", gpu_type="a100", settings=lines)
    default, conf = (slurm_conf(_layout(tmp_path / "box"), "here", 4096), slurm_conf(plan, "here", 4096))
    changed = [line for line in conf.splitlines() if line not in default.splitlines()]
    assert [line for line in changed if not line.startswith("NodeName=")] == list(lines)
    assert " Gres=gpu:a100:2 " in conf
    assert "JobRequeue=1" not in conf
    assert "Name=gpu Type=a100 File=" in gres_conf(plan)
    plan.folder.mkdir()
    plan.save()
    assert SandboxLayout.load(plan.folder) == plan


@pytest.mark.parametrize(
    ("system", "uid", "search_path", "message"),
    [
        ("Darwin", 0, None, "requires Linux, but this machine runs Darwin.*--backend local"),
        ("Linux", 0, "/nonexistent", "are missing: .*slurmctld.*apt-get install slurm-wlm munge"),
        ("Linux", 1000, "programs", "requires root.*runs as user 1000.*sudo"),
    ],
)
def test_missing_requirements_are_reported(tmp_path, system, uid, search_path, message):
    for program in PROGRAMS:
        (tmp_path / program).touch(mode=0o755)
    path = str(tmp_path) if search_path == "programs" else search_path or ""
    with pytest.raises(UserError, match=message):
        check_requirements(system, uid, path)
