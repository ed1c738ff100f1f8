"""A fake GPU driver behind pynvml."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pynvml
import pytest


class FakeDriver:
    """NVML's answers for one GPU in two parts, one whole GPU, and one that belongs to another job."""

    #: The answer to a function with these arguments after the handle; other functions are not supported.
    answers: ClassVar[dict[tuple[object, ...], Any]] = {
        ("nvmlInit",): None,
        ("nvmlShutdown",): None,
        ("nvmlDeviceGetCount",): 3,
        ("nvmlDeviceGetMaxMigDeviceCount",): 7,
    }

    def __getattr__(self, name: str) -> Any:
        def answer(*args: object) -> Any:
            if (name, *args[1:]) in self.answers:
                return self.answers[name, *args[1:]]
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        return answer

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
    answers: ClassVar[dict[tuple[object, ...], Any]] = FakeDriver.answers | {
        ("nvmlDeviceGetCount",): 1,
        ("nvmlDeviceGetName",): "H100",
        ("nvmlGpmQueryDeviceSupport",): SimpleNamespace(isSupportedDevice=1),
        ("nvmlDeviceGetUtilizationRates",): SimpleNamespace(gpu=83, memory=20),
        ("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU): 71,
        ("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM): 1410,
        # The name of old drivers; the new name is refused.
        ("nvmlDeviceGetCurrentClocksThrottleReasons",): pynvml.nvmlClocksEventReasonSwPowerCap
        | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        ("nvmlDeviceGetComputeRunningProcesses",): [SimpleNamespace(pid=1), SimpleNamespace(pid=2)],
    }

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDeviceGet") and super().__getattribute__("lost"):
            return super().__getattribute__("fall_off_the_bus")
        return super().__getattribute__(name)

    def fall_off_the_bus(self, *args: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [0, 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        """Return millijoules: 500 J between two calls."""
        self.energy += 500_000
        return self.energy

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:  # noqa: N802
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return 2

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


def install_fake_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    for name in dir(pynvml):
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            monkeypatch.setattr(pynvml, name, lambda *args, name=name: getattr(driver, name)(*args))
