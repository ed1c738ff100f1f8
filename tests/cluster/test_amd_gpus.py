"""AMD GPUs from a fake topology of the driver, and the variables that select them."""

from pathlib import Path

import pytest

from hpctrain.cluster import detect, visible_gpus
from hpctrain.cluster.amd_gpus import AmdGpu, check_amd_variables, list_amd_gpus, visible_amd_gpus
from hpctrain.cluster.device_plan import plan_device
from hpctrain.cluster.visible_gpus import gpu_variables
from hpctrain.errors import EnvironmentMismatch
from hpctrain.supervisor.launch import step_launchers
from hpctrain.telemetry.sampling import nvml

GPUS = [AmdGpu(f"0000:{bus:02x}:00.0", f"GPU-{bus:016x}") for bus in (0xC1, 0xC6, 0xC9, 0xD1)]


def write_topology(folder: Path) -> Path:
    """Write two CPUs, four GPUs, and a GPU of another job, whose properties cannot be read."""
    for number in (0, 1):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "properties").write_text("cpu_cores_count 64\nsimd_count 0\nlocation_id 0\n")
    for number, bus in ((2, 0xC1), (10, 0xD1), (3, 0xC6), (9, 0xC9)):
        (folder / str(number)).mkdir()
        (folder / str(number) / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count 304\nlocation_id {bus << 8}\ndomain 0\nunique_id {bus}\n"
        )
    (folder / "11" / "properties").mkdir(parents=True)
    return folder


@pytest.fixture
def amd_machine(tmp_path, monkeypatch):
    gpus = list_amd_gpus(write_topology(tmp_path))
    for module in (nvml, step_launchers, visible_gpus):
        monkeypatch.setattr(module, "list_amd_gpus", lambda: gpus)
    monkeypatch.setattr(nvml, "list_gpu_uuids", list)


def test_gpus_of_a_fake_topology_are_listed_in_the_order_of_the_driver(tmp_path):
    assert list_amd_gpus(write_topology(tmp_path)) == GPUS
    assert list_amd_gpus(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, [2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000D1,0"}, [3, 0]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
    ],
)
def test_variables_select_fake_amd_gpus_like_rocm(environ, numbers, amd_machine):
    assert visible_amd_gpus(environ, GPUS) == [GPUS[number] for number in numbers]
    assert nvml.count_gpus(environ) == len(numbers)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
            "HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1 differ.*Unset one",
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"},
            "ROCR_VISIBLE_DEVICES=2,3 makes 2 GPUs visible, numbered from 0, but CUDA_VISIBLE_DEVICES=2,3 ",
        ),
        ({"HIP_VISIBLE_DEVICES": "0, 1", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, None),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, None),
        ({"ROCR_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_contradictory_variables_are_an_error_only_with_rocm(environ, message):
    single_rank = detect({})
    assert plan_device(single_rank, environ, 0).index is None
    if message is None:
        check_amd_variables(environ)
        plan = plan_device(single_rank, environ, 0, is_rocm=True)
        assert all(f"{name}={text}" in plan.source for name, text in environ.items())
    else:
        with pytest.raises(EnvironmentMismatch, match=message):
            plan_device(single_rank, environ, 2, is_rocm=True)


def test_simulated_nodes_divide_fake_amd_gpus(amd_machine):
    assert step_launchers.visible_gpus({"ROCR_VISIBLE_DEVICES": "1,2"}) == ["0", "1"]
    assert step_launchers.visible_gpus({"HIP_VISIBLE_DEVICES": "3,2"}) == ["3", "2"]
    assert gpu_variables(["3"]) == {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}
