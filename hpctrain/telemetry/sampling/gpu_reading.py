"""Measurements of one GPU or MIG device at a moment, as far as the driver reports them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuReading:
    """Measurements of a GPU or MIG device at a moment; None if unknown."""

    util: float | None = None
    """Percentage of the last second in which a kernel ran."""
    memory: int | None = None
    """Bytes in use by all processes."""
    power_w: float | None = None
    temp_c: float | None = None
    clock_mhz: float | None = None
    throttled: tuple[str, ...] = ()
    """Reasons for a reduced clock, except that the GPU is idle."""
    ecc_errors: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    processes: int | None = None
    """Number of compute processes."""
    xids: tuple[int, ...] = ()
    """Xid numbers of errors that the driver reported since the last reading."""
    pcie_rx: float | None = None
    """Bytes per second received over PCIe."""
    pcie_tx: float | None = None
    nvlink_rx: int | None = None
    """Bytes received over NVLink since the driver was loaded."""
    nvlink_tx: int | None = None


def read_gpu(handle: Any, whole: Any, *, xids: tuple[int, ...], traffic: bool) -> GpuReading:
    """Read the measurements of a GPU or MIG device.

    Args:
        handle: the GPU or MIG device.
        whole: the GPU.
        xids: errors that the driver reported since the last reading.
        traffic: read PCIe and NVLink traffic, too.
    """
    import pynvml

    milliwatts = query_driver(pynvml.nvmlDeviceGetPowerUsage, whole)
    pcie: tuple[float | None, ...] = (None, None)
    links: tuple[int | None, int | None] = (None, None)
    if traffic:
        kinds = (pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES)
        # In kilobytes per second (nvmlDeviceGetPcieThroughput).
        pcie = tuple(
            _times(query_driver(pynvml.nvmlDeviceGetPcieThroughput, whole, kind), 1000) for kind in kinds
        )
        links = _nvlink(whole)
    reasons = query_driver(pynvml.nvmlDeviceGetCurrentClocksEventReasons, whole)
    if reasons is None:  # Drivers before 535 only have the older name.
        reasons = query_driver(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, whole)
    processes = query_driver(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return GpuReading(
        util=read_field(query_driver(pynvml.nvmlDeviceGetUtilizationRates, handle), "gpu"),
        memory=read_field(query_driver(pynvml.nvmlDeviceGetMemoryInfo, handle), "used"),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temp_c=query_driver(pynvml.nvmlDeviceGetTemperature, whole, pynvml.NVML_TEMPERATURE_GPU),
        clock_mhz=query_driver(pynvml.nvmlDeviceGetClockInfo, whole, pynvml.NVML_CLOCK_SM),
        throttled=_reasons(reasons or 0),
        ecc_errors=query_driver(
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
    """Return received and sent bytes over all links, since the driver was loaded."""
    import pynvml

    fields = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)
    # Scope 2^32 - 1 selects all links; the values are in KiB (nvml.h, at these fields).
    values = query_driver(pynvml.nvmlDeviceGetFieldValues, handle, [(each, 0xFFFFFFFF) for each in fields])
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


def query_driver(function: Callable[..., Any], *args: Any) -> Any:
    """Call an NVML function; return None if it is unsupported or the GPU is lost."""
    import pynvml

    try:
        return function(*args)
    except pynvml.NVMLError:
        return None


def read_field(answer: Any, name: str) -> Any:
    """Return a field of an answer, if there is one."""
    return None if answer is None else getattr(answer, name)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
