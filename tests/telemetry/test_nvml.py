"""GPU readings from a fake driver, including a lost GPU."""

import pynvml
import pytest
from helpers.fake_gpu_driver import DetailedFakeDriver, FakeDriver, install_fake_driver
from test_sampler import sample

from hpctrain.files import read_json_lines
from hpctrain.telemetry.sampling.nvml import GpuReader, GpuReading, count_gpus, count_visible
from hpctrain.telemetry.sampling.sampler import ProcfsReader, TelemetrySampler


@pytest.mark.parametrize(
    ("listed", "memory"),
    [
        (None, [9, 5, 9]),
        (["1"], [9]),
        (["GPU-b"], [9]),
        (["MIG-1"], [5]),
        (["0"], [9, 5]),
        (["7"], []),
        ([], []),
    ],
)
def test_mig_parts_are_read_with_fake_driver(monkeypatch, listed, memory):
    install_fake_driver(monkeypatch, FakeDriver())
    with GpuReader(listed) as gpus:
        readings = gpus.read()
        assert [reading.memory for reading in readings] == memory
        assert gpus.memory_bytes == [10] * len(memory)
        assert all(set(reading.xids) == {79} for reading in readings)
        assert all(reading.xids == () for reading in gpus.read())
    if listed is None:
        assert [reading.power_w for reading in readings] == [300, 300, 600]
    assert all(reading.util is None and reading.throttled == () for reading in readings)


def test_all_readings_of_fake_driver_are_read(monkeypatch):
    install_fake_driver(monkeypatch, DetailedFakeDriver())
    with GpuReader() as gpus:
        assert gpus.names == ["H100"]
        (reading,) = gpus.read()
        (second,) = gpus.read()
    assert (reading.sm, second.sm, second.tensor, second.dram) == (None, 61.5, None, 20.25)
    assert second.energy_j == reading.energy_j + 500
    assert reading == GpuReading(
        util=83,
        memory=9,
        power_w=300.0,
        temp_c=71,
        clock_mhz=1410,
        throttled=("power cap", "hardware temperature limit"),
        ecc_errors=2,
        processes=2,
        xids=(79,),
        energy_j=7500.0,
    )


def test_activity_and_energy_of_fake_driver_are_sampled_and_samples_are_freed(monkeypatch, tmp_path):
    driver = DetailedFakeDriver()
    install_fake_driver(monkeypatch, driver)
    with GpuReader() as gpus:
        _, line = sample(tmp_path / "node-000.jsonl", 5, gpus)
        assert driver.allocated == 2
    assert driver.allocated == 0
    assert (line["gpu_sm"], line["gpu_dram"], line["gpu_energy_j"]) == ([61.5], [20.2], [2500.0])
    assert "gpu_tensor" not in line


def test_lost_gpu_does_not_stop_the_sampler(monkeypatch, tmp_path):
    """The fake driver then answers every query with an error; the node is still sampled."""
    driver = DetailedFakeDriver()
    install_fake_driver(monkeypatch, driver)
    path, now = tmp_path / "node-000.jsonl", [0.0]
    with GpuReader() as gpus:
        sampler = TelemetrySampler(
            path, gpus, ProcfsReader(), host="n1", run_id="r", clock=lambda: now[0], now=lambda: now[0]
        )
        sampler.begin()
        for second in range(1, 16):
            driver.lost = second > 5
            now[0] = second
            sampler.read()
    begin, complete, *lost = read_json_lines(path)
    assert begin["gpu_names"] == ["H100"]
    assert complete["gpu_util"] == [83.0]
    assert len(lost) == 2
    for line in lost:
        assert not any(name in line for name in ("gpu_util", "gpu_memory", "gpu_throttled"))
        assert line["memory"] > 0


@pytest.mark.parametrize(
    "number", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 999]
)
def test_no_gpus_without_a_working_driver(monkeypatch, number):
    class NoDriver(FakeDriver):
        def nvmlInit(self) -> None:  # noqa: N802
            raise pynvml.NVMLError(number)

    install_fake_driver(monkeypatch, NoDriver())
    with GpuReader() as gpus:
        assert (gpus.names, gpus.memory_bytes, gpus.read()) == ([], [], [])
    assert count_gpus({}) == 0


INSTALLED = ["GPU-aa11", "GPU-bb22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("listed", "number"),
    [
        (None, 3),
        ([], 0),
        (["2", "0"], 2),
        (["0", "5", "1"], 1),
        (["GPU-bb", "GPU-aa11"], 2),
        (["GPU-zz", "GPU-aa11"], 0),
        (["MIG-1", "MIG-2"], 2),
    ],
)
def test_listed_gpus_count_up_to_the_first_invalid_one(listed, number):
    assert count_visible(INSTALLED, listed) == number
