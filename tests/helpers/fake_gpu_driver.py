"""A fake GPU driver behind pynvml."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest


class FakeDriver:
    """NVML's answers for one GPU in two parts, one whole GPU, and one that belongs to another job."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: object) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        return fail

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return f"GPU-{'ab'[index]}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlEventSetCreate(self) -> list[SimpleNamespace]:  # noqa: N802
        return []

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: list[Any]) -> None:  # noqa: N802
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        events.append(SimpleNamespace(device=handle, eventData=79))

    def nvmlEventSetWait_v2(self, events: list[Any], timeout: int) -> SimpleNamespace:  # noqa: N802
        assert timeout == 0
        if not events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return events.pop()

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [int(handle == "GPU-a")] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        if index >= 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"MIG-{index}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=5 if handle == "MIG-1" else 9, total=10)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return {"GPU-a": 300_000, "GPU-b": 600_000}[handle]


class DetailedFakeDriver(FakeDriver):
    """One whole GPU with all readings, until it is `lost`."""

    lost = False
    energy, allocated = 7_000_000, 0
    """Energy in millijoules, and number of samples that were not freed."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDeviceGet") and super().__getattribute__("lost"):
            return super().__getattribute__("fall_off_the_bus")
        return super().__getattribute__(name)

    def fall_off_the_bus(self, *args: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [0, 0]

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "H100"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        """Return millijoules: 500 J between two calls."""
        self.energy += 500_000
        return self.energy

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> pynvml.c_nvmlGpmSample_t:  # noqa: N802
        self.allocated += 1
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802
        self.allocated -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:  # noqa: N802
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:  # noqa: N802
        """Answer all metrics but the tensor cores."""
        values = {pynvml.NVML_GPM_METRIC_SM_UTIL: 61.5, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 20.25}
        for metric in request.metrics[: request.numMetrics]:
            is_known = metric.metricId in values
            metric.nvmlReturn = pynvml.NVML_SUCCESS if is_known else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = values.get(metric.metricId, -1.0)
        return request

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=83, memory=20)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 71

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        assert clock == pynvml.NVML_CLOCK_SM
        return 1410

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        """Answers under the name of old drivers; the new name is refused."""
        return pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:  # noqa: N802
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return 2

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]


def install_fake_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    """Make pynvml call `driver`."""
    for name in dir(pynvml):
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            monkeypatch.setattr(pynvml, name, lambda *args, name=name: getattr(driver, name)(*args))
