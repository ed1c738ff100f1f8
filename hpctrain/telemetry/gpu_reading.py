"""What one GPU, or a part of one, says of itself at a moment, as far as the driver answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuReading:
    """What a GPU, or a part of one, says at a moment; None stands for what it does not say."""

    util: float | None = None
    """Part of the last second in which a kernel ran, in per cent."""
    memory: int | None = None
    """Bytes in use, by whomever."""
    power_w: float | None = None
    temp_c: float | None = None
    clock_mhz: float | None = None
    throttled: tuple[str, ...] = ()
    """Why the clock is lower than it could be; that the GPU has nothing to do is no reason."""
    ecc_errors: int | None = None
    """Memory errors that could not be corrected, since the driver was loaded."""
    processes: int | None = None
    """Processes that compute on it."""
    xids: tuple[int, ...] = ()
    """Numbers of the errors that the driver has reported of it since the last reading (Xid)."""
    pcie_rx: float | None = None
    """Bytes a second that it gets over PCIe."""
    pcie_tx: float | None = None
    nvlink_rx: int | None = None
    """Bytes that it has got over NVLink since the driver was loaded."""
    nvlink_tx: int | None = None


def read_gpu(handle: Any, whole: Any, *, xids: tuple[int, ...], traffic: bool) -> GpuReading:
    """What it says now.

    Args:
        handle: the GPU, or the part of one.
        whole: the GPU.
        xids: errors that the driver has reported of it meanwhile.
        traffic: whether to ask for that over PCIe and NVLink.
    """
    import pynvml

    milliwatts = ask(pynvml.nvmlDeviceGetPowerUsage, whole)
    pcie: tuple[float | None, ...] = (None, None)
    links: tuple[int | None, int | None] = (None, None)
    if traffic:
        kinds = (pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES)
        # In kilobytes a second (nvmlDeviceGetPcieThroughput).
        pcie = tuple(_times(ask(pynvml.nvmlDeviceGetPcieThroughput, whole, kind), 1000) for kind in kinds)
        links = _nvlink(whole)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, whole)
    if reasons is None:  # Drivers before 535 know the older name only.
        reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, whole)
    processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return GpuReading(
        util=part_of(ask(pynvml.nvmlDeviceGetUtilizationRates, handle), "gpu"),
        memory=part_of(ask(pynvml.nvmlDeviceGetMemoryInfo, handle), "used"),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temp_c=ask(pynvml.nvmlDeviceGetTemperature, whole, pynvml.NVML_TEMPERATURE_GPU),
        clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, whole, pynvml.NVML_CLOCK_SM),
        throttled=_reasons(reasons or 0),
        ecc_errors=ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            whole,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        processes=None if processes is None else len(processes),
        xids=xids,
        pcie_rx=pcie[0],
        pcie_tx=pcie[1],
        nvlink_rx=links[0],
        nvlink_tx=links[1],
    )


def _nvlink(handle: Any) -> tuple[int | None, int | None]:
    """Bytes over all links together, since the driver was loaded."""
    import pynvml

    fields = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)
    # Of all links, which scope 2^32 - 1 stands for; in kibibytes (nvml.h, at these fields).
    values = ask(pynvml.nvmlDeviceGetFieldValues, handle, [(each, 0xFFFFFFFF) for each in fields])
    if values is None or any(value.nvmlReturn != pynvml.NVML_SUCCESS for value in values):
        return None, None
    received, sent = (int(value.value.ullVal) * 1024 for value in values)
    return received, sent


def _reasons(bits: int) -> tuple[str, ...]:
    import pynvml

    words = {
        pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
        pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature, by hardware",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
        pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "clock setting",
        pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    }
    return tuple(word for bit, word in words.items() if bits & bit)


def ask(function: Callable[..., Any], *args: Any) -> Any:
    """What the driver answers; None where it does not know, or the GPU is gone."""
    import pynvml

    try:
        return function(*args)
    except pynvml.NVMLError:
        return None


def part_of(answer: Any, name: str) -> Any:
    """A field of an answer, if there is one."""
    return None if answer is None else getattr(answer, name)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
