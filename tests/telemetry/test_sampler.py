import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.telemetry.report.device_metrics import read_device_metrics
from hpctrain.telemetry.sampling import sampler
from hpctrain.telemetry.sampling.nvml import GpuReader, GpuReading
from hpctrain.telemetry.sampling.sampler import ProcfsReader, TelemetrySampler

STAT = "cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n"
MEMORY = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    400 kB\n"
DISKS = "".join(
    f"   8  {n} {name} 1 0 {{sectors}} 0 1 0 {{sectors}} 0 0 0 0\n" for n, name in enumerate(["sda", "sda1"])
)
NETWORK = (
    "a\nb\n    lo: 99999 1 0 0 0 0 0 0 99999 1 0 0 0 0 0 0\n  eth0: {rx} 1 0 0 0 0 0 0 {tx} 1 0 0 0 0 0 0\n"
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def write_proc(proc: Path, *, busy: int, idle: int, sectors: int, rx: int, tx: int) -> None:
    (proc / "net").mkdir(parents=True, exist_ok=True)
    (proc / "stat").write_text(STAT.format(busy=busy, idle=idle))
    (proc / "meminfo").write_text(MEMORY)
    (proc / "diskstats").write_text(DISKS.format(sectors=sectors))
    (proc / "net/dev").write_text(NETWORK.format(rx=rx, tx=tx))


def test_node_is_read_from_proc(tmp_path):
    clock = Clock()
    write_proc(tmp_path, busy=100, idle=100, sectors=10, rx=1000, tx=2000)
    node = ProcfsReader(tmp_path, clock)
    clock.now += 2
    write_proc(tmp_path, busy=130, idle=170, sectors=20, rx=3000, tx=2000)
    reading = node.read()
    assert reading == {
        "cpu": pytest.approx(30),
        "memory": 600 * 1024,
        "disk_read": 10 * 512 / 2,
        "disk_write": 10 * 512 / 2,
        "net_rx": 1000,
        "net_tx": 0,
    }
    assert node.memory_bytes == 1000 * 1024


@pytest.mark.parametrize("text", [None, "", "garbage\n", "cpu x y\nMemTotal: many\n"])
def test_missing_kernel_data_is_unknown(tmp_path, text):
    if text is not None:
        (tmp_path / "net").mkdir()
        for name in ("stat", "meminfo", "diskstats", "net/dev"):
            (tmp_path / name).write_text(text)
    reading = ProcfsReader(tmp_path).read()
    assert set(reading) <= {"disk_read", "disk_write", "net_rx", "net_tx"}
    assert not any(reading.values())


class FakeGpus(GpuReader):
    """Two GPUs; the second one has few readings, like a MIG part."""

    def __init__(self) -> None:
        super().__init__()
        self.util = 0.0

    @property
    def names(self) -> list[str]:
        return ["H100", "H100 MIG 1g"]

    @property
    def memory_bytes(self) -> list[int | None]:
        return [80 * 2**30, None]

    def read(self) -> list[GpuReading]:
        self.util += 10
        first = GpuReading(
            util=self.util,
            memory=int(self.util),
            power_w=500.0,
            temp_c=60,
            throttled=("power cap",) if self.util > 50 else (),
            ecc_errors=0,
            xids=(79, 43) if self.util == 30 else (),
            energy_j=self.util * 100,
        )
        return [first, GpuReading(memory=7)]


def sample(path: Path, seconds: int, gpus: GpuReader) -> list[dict]:
    clock = Clock()
    telemetry_sampler = TelemetrySampler(
        path, gpus, ProcfsReader(), host="n1", run_id='a "b"', clock=clock, now=clock
    )
    telemetry_sampler.begin()
    for _ in range(seconds):
        clock.now += 1
        telemetry_sampler.read()
    telemetry_sampler.flush()
    return list(read_json_lines(path))


def test_record_aggregates_readings_of_fake_gpus(tmp_path):
    begin, line, *_ = sample(tmp_path / "node-000.jsonl", 5, FakeGpus())
    assert begin["gpu_names"] == ["H100", "H100 MIG 1g"]
    assert begin["cpus"] == os.cpu_count()
    assert line["time"] == 1005.0
    assert (line["host"], line["seconds"]) == ("n1", 5)
    assert line["gpu_util"] == [40.0, None]  # the mean of 20 to 60; 10 was read at the beginning
    assert line["gpu_memory"] == [60, 7]
    assert line["gpu_throttled"] == [["power cap"], []]
    assert line["gpu_ecc_errors"] == [0, None]
    assert line["gpu_xids"] == [[43, 79], []]
    assert line["gpu_energy_j"] == [5000.0, None]
    assert "gpu_clock_mhz" not in line
    assert line["memory"] > 0


def start(run: RunDir) -> subprocess.Popen:
    command = [sys.executable, "-m", sampler.__name__, str(run.path), "3"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
    )
    wait_for(run.telemetry(3).exists, 20, "the first line")
    return process


def test_sampler_ignores_signals_and_ends_with_its_parent(tmp_path):
    run = RunDir(tmp_path / "run")
    with start(run) as process:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
        process.stdin.close()
        assert process.wait(120) == 0
        assert process.stderr.read() == ""
    begin, last = read_json_lines(run.telemetry(3))
    assert begin["cpus"] == os.cpu_count()
    assert last["seconds"] < 20


def test_second_sampler_of_a_node_takes_over_when_the_first_ends(tmp_path):
    """Several process groups of a batch script may share a node."""
    run = RunDir(tmp_path / "run")
    with start(run) as first, start(run) as second:
        time.sleep(1.5 * sampler.READ_INTERVAL_S)
        (begin,) = read_json_lines(run.telemetry(3))
        first.stdin.close()
        assert first.wait(20) == 0
        wait_for(lambda: len(list(read_json_lines(run.telemetry(3)))) == 3, 20, "the second sampler")
        second.stdin.close()
        assert second.wait(20) == 0
    assert "cpus" in begin


def test_means_are_weighted_by_the_time_of_the_lines(tmp_path):
    path = tmp_path / "node-000.jsonl"
    busy = {"host": "n1", "gpu_util": [90.0], "gpu_clock_mhz": [1000], "gpu_throttled": [["temperature"]]}
    calm = {"host": "n1", "gpu_util": [60.0], "gpu_clock_mhz": [2000], "gpu_throttled": [[]]}
    times = range(1005, 1601, 5)
    lines = [{"time": time, "seconds": 5.0, **busy} for time in times]
    lines += [{"time": time, "seconds": 30.0, **calm} for time in range(1630, 2201, 30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    devices = read_device_metrics([path], 1000.0, 2200.0)
    assert devices.mean("gpu_util") == pytest.approx(75.0, abs=1.0)
    (node,) = devices.nodes
    assert node.throttled == {"temperature": pytest.approx(0.5, abs=0.02)}
    assert node.clock_mhz == pytest.approx(1500, abs=20)


@pytest.mark.gpu
def test_real_gpus_have_readings():
    import torch

    with GpuReader() as gpus:
        gpus.read()
        ones = torch.ones(2**14, 2**14, device="cuda", dtype=torch.bfloat16)
        for _ in range(40):
            ones @ ones
        torch.cuda.synchronize()
        readings = gpus.read()
    assert len(readings) >= torch.cuda.device_count()
    assert max(reading.energy_j or 0 for reading in readings) > 0
    if torch.cuda.get_device_capability() >= (9, 0):
        assert max(reading.sm or 0 for reading in readings) > 10
        assert max(reading.tensor or 0 for reading in readings) > 10
        assert max(reading.dram or 0 for reading in readings) > 0
    assert max(reading.memory for reading in readings) >= 2**30
    for reading in readings:
        assert 0 <= reading.util <= 100
        assert 10 < reading.temp_c < 110
        assert reading.power_w > 5


def test_newest_line_is_in_a_file_for_prometheus(tmp_path):
    sample(tmp_path / "node-000.jsonl", 5, FakeGpus())
    text = (tmp_path / "node-000.prom").read_text()
    assert (
        '# TYPE hpctrain_gpu_util gauge\nhpctrain_gpu_util{run="a \\"b\\"",host="n1",gpu="0"} 40.0\n' in text
    )
    assert 'hpctrain_gpu_memory{run="a \\"b\\"",host="n1",gpu="1"} 7\n' in text
    assert "gpu_xids" not in text
    pattern = r'# TYPE \w+ gauge|\w+\{\w+="([^"\\]|\\.)*"(,\w+="([^"\\]|\\.)*")*\} [-\d.e+]+'
    assert all(re.fullmatch(pattern, line) for line in text.splitlines())
