"""Read the GPUs of this machine from the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hpctrain.cluster.amd_gpus import list_amd_gpus, visible_amd_gpus
from hpctrain.cluster.visible_gpus import visible_devices
from hpctrain.text import is_count

try:
    import pynvml
except ImportError:  # A container image may contain only Python and PyTorch.
    pynvml = None


@dataclass(frozen=True)
class GpuReading:
    """Measurements of a GPU or MIG device at a time; None if unknown."""

    util: float | None = None
    """Percentage of the last second during which a kernel ran."""
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
    """Xid numbers of errors reported by the driver since the last reading."""
    energy_j: float | None = None
    """Energy consumed since the driver was loaded."""
    sm: float | None = None
    """Percentage of the multiprocessors that were busy since the previous reading (GPM)."""
    tensor: float | None = None
    """Percentage of the time during which tensor cores computed."""
    dram: float | None = None
    """Percentage of the memory bandwidth in use."""


def read_gpu(handle: Any, gpu: Any, *, xids: tuple[int, ...], activity: Mapping[str, float]) -> GpuReading:
    """Read the measurements of a GPU or MIG device; `gpu` is the complete GPU."""
    milliwatts = query_driver(pynvml.nvmlDeviceGetPowerUsage, gpu)
    millijoules = query_driver(pynvml.nvmlDeviceGetTotalEnergyConsumption, gpu)
    reasons = query_driver(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
    if reasons is None:  # Drivers before 535 have only the older name.
        reasons = query_driver(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    processes = query_driver(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return GpuReading(
        util=query_driver(pynvml.nvmlDeviceGetUtilizationRates, handle, field="gpu"),
        memory=query_driver(pynvml.nvmlDeviceGetMemoryInfo, handle, field="used"),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temp_c=query_driver(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
        clock_mhz=query_driver(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        throttled=_reasons(reasons or 0),
        ecc_errors=query_driver(
            pynvml.nvmlDeviceGetTotalEccErrors,
            gpu,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        processes=None if processes is None else len(processes),
        xids=xids,
        # MIG devices share the energy of their GPU.
        energy_j=None if handle is not gpu or millijoules is None else millijoules / 1000,
        **activity,
    )


def _reasons(bits: int) -> tuple[str, ...]:
    names = {
        pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
        pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware temperature limit",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
        pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "clock setting",
        pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    }
    return tuple(name for bit, name in names.items() if bits & bit)


def query_driver(function: Callable[..., Any], *args: Any, field: str | None = None) -> Any:
    """Return the answer of an NVML function, or a field of it; None if unsupported or the GPU is lost."""
    try:
        answer = function(*args)
    except pynvml.NVMLError:
        return None
    return answer if field is None else getattr(answer, field)


#: Maximum number of errors per reading, because a faulty GPU may report errors endlessly.
_MAX_ERRORS = 100


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs visible to processes with these variables; 0 without a driver."""
    if uuids := list_gpu_uuids():
        return count_visible(uuids, visible_devices(environ))
    return len(visible_amd_gpus(environ, list_amd_gpus()))


def count_visible(installed: Sequence[str], listed: Sequence[str] | None) -> int:
    """Return the number of devices in `listed` before the first that is not installed; None lists all."""

    def exists(entry: str) -> bool:
        if is_count(entry):
            return int(entry) < len(installed)
        return entry.startswith("MIG-") or any(uuid.startswith(entry) for uuid in installed)

    if listed is None or not installed:
        return len(installed)
    return next((index for index, entry in enumerate(listed) if not exists(entry)), len(listed))


def list_gpu_uuids() -> list[str]:
    """Return UUIDs of the GPUs that this process may open, in the driver's order."""
    with GpuReader() as reader:
        return list(dict.fromkeys(_uuid(gpu) for _, _, gpu in reader.places))


def list_bus_ids(environ: Mapping[str, str]) -> list[str]:
    """Return the PCI addresses of the visible GPUs, such as `0000:3b:00.0`, in the order of `cuda:N`."""
    with GpuReader() as reader:
        installed = [(index, uuids, _bus_id(gpu)) for index, uuids, gpu in reader.places]
    if not installed:
        return [gpu.bus_id for gpu in visible_amd_gpus(environ, list_amd_gpus())]
    if (listed := visible_devices(environ)) is None:
        return list(dict.fromkeys(bus_id for _, _, bus_id in installed))
    bus_ids: list[str] = []
    for entry in listed:
        matches = [bus_id for index, uuids, bus_id in installed if _means(entry, index, uuids)]
        if not matches:
            break
        bus_ids.append(matches[0])
    return bus_ids


def _bus_id(handle: Any) -> str:
    name = query_driver(pynvml.nvmlDeviceGetPciInfo, handle, field="busId") or ""
    # The driver writes eight digits for the domain, the kernel four.
    domain, _, address = (name.decode() if isinstance(name, bytes) else str(name)).lower().partition(":")
    return f"{domain[-4:]}:{address}"


@dataclass(frozen=True)
class DriverFacts:
    version: str | None = None
    """None without a driver."""
    cuda: str | None = None
    """The newest CUDA version supported by the driver."""
    names: list[str] = field(default_factory=list)
    """Names of the GPUs that this process may open, in the driver's order."""


def read_driver_facts() -> DriverFacts:
    """Read the driver's facts; blocks if the driver hangs."""
    if pynvml is None:
        return DriverFacts()
    with GpuReader() as reader:
        version = query_driver(pynvml.nvmlSystemGetDriverVersion)
        cuda = query_driver(pynvml.nvmlSystemGetCudaDriverVersion)
        if version is None:
            return DriverFacts()
        wholes = {index: gpu for index, _, gpu in reader.places}
        names = [str(query_driver(pynvml.nvmlDeviceGetName, gpu)) for gpu in wholes.values()]
    # An integer such as 12040 (nvmlSystemGetCudaDriverVersion).
    return DriverFacts(str(version), None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}", names)


class GpuActivity:
    """Activity of a GPU between two readings, from GPU performance monitoring (GPM, Hopper and newer).

    The utilization counts any running kernel. The activity shows how much of the GPU was busy. MIG devices
    are not measured.
    """

    def __init__(self, handle: Any) -> None:
        supported = query_driver(pynvml.nvmlGpmQueryDeviceSupport, handle, field="isSupportedDevice")
        self._handle, self._samples = handle, [query_driver(pynvml.nvmlGpmSampleAlloc) for _ in "12"]
        self._is_supported = bool(supported) and None not in self._samples
        self._has_sample = self._is_supported and self._sample()

    def _sample(self) -> bool:
        self._samples.reverse()
        return query_driver(pynvml.nvmlGpmSampleGet, self._handle, self._samples[1]) is not None

    def read(self) -> dict[str, float]:
        """Return the activity since the last call, in per cent; empty if not supported."""
        before, self._has_sample = self._has_sample, self._is_supported and self._sample()
        if not before or not self._has_sample:
            return {}
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 3
        request.sample1, request.sample2 = self._samples
        names = {
            "sm": pynvml.NVML_GPM_METRIC_SM_UTIL,
            "tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "dram": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        for place, metric in enumerate(names.values()):
            request.metrics[place].metricId = metric
        if query_driver(pynvml.nvmlGpmMetricsGet, request) is None:
            return {}
        pairs = zip(names, request.metrics, strict=False)
        return {name: metric.value for name, metric in pairs if metric.nvmlReturn == pynvml.NVML_SUCCESS}

    def close(self) -> None:
        for sample in self._samples:
            if sample is not None:
                query_driver(pynvml.nvmlGpmSampleFree, sample)


class GpuReader:
    """Reader of the GPUs that this process may open. Use as a context manager.

    For a GPU with MIG enabled, the MIG devices are read: the driver reports only memory for these. Values of
    the GPU, such as the power, are repeated for each MIG device. Without a driver, there are no GPUs.
    """

    def __init__(self, listed: Sequence[str] | None = None) -> None:
        """Create a reader of the devices from `visible_devices`; None reads all."""
        self._listed = listed
        # Pairs of a MIG device, or the GPU itself, and the GPU.
        self._handles: list[tuple[Any, Any]] = []
        #: Index, UUIDs and GPU of each device.
        self.places: list[tuple[int, list[str], Any]] = []
        self._is_open = False
        self._errors: Any = None
        self._activities: list[GpuActivity | None] = []

    def __enter__(self) -> Self:
        if pynvml is None:
            return self
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return self
        self._is_open = True
        for index in range(query_driver(pynvml.nvmlDeviceGetCount) or 0):
            if (handle := query_driver(pynvml.nvmlDeviceGetHandleByIndex, index)) is None:
                continue  # another job's, blocked by a cgroup
            for device in list(_mig_devices(handle)) or [handle]:
                uuids = [_uuid(handle), _uuid(device)]
                if self._listed is None or any(_means(entry, index, uuids) for entry in self._listed):
                    self._handles.append((device, handle))
                    self.places.append((index, uuids, handle))
        if self._handles:
            self._errors = query_driver(pynvml.nvmlEventSetCreate)
        for _, gpu in self._handles if self._errors is not None else ():
            event = pynvml.nvmlEventTypeXidCriticalError
            query_driver(pynvml.nvmlDeviceRegisterEvents, gpu, event, self._errors)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            for activity in filter(None, self._activities):
                activity.close()
            if self._errors is not None:
                query_driver(pynvml.nvmlEventSetFree, self._errors)
            query_driver(pynvml.nvmlShutdown)
        self._handles, self._is_open, self._errors, self._activities = [], False, None, []

    @property
    def names(self) -> list[str]:
        return [str(query_driver(pynvml.nvmlDeviceGetName, handle)) for handle, _ in self._handles]

    @property
    def memory_bytes(self) -> list[int | None]:
        """Total memory of each device, in bytes."""
        return [
            query_driver(pynvml.nvmlDeviceGetMemoryInfo, handle, field="total") for handle, _ in self._handles
        ]

    @property
    def pids(self) -> list[list[int]]:
        return [
            [
                process.pid
                for process in query_driver(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            ]
            for handle, _ in self._handles
        ]

    def read(self) -> list[GpuReading]:
        """Read all devices."""
        xids = self._new_errors()
        if is_first := not self._activities:
            self._activities = [GpuActivity(gpu) if device is gpu else None for device, gpu in self._handles]
        return [
            read_gpu(
                handle,
                gpu,
                xids=xids.get(_uuid(gpu), ()),
                activity=activity.read() if activity is not None and not is_first else {},
            )
            for (handle, gpu), activity in zip(self._handles, self._activities, strict=True)
        ]

    def _new_errors(self) -> dict[str, tuple[int, ...]]:
        """Return Xid numbers of errors reported by the driver since the last call, by GPU UUID."""
        errors: dict[str, tuple[int, ...]] = {}
        if self._errors is None:
            return errors
        for _ in range(_MAX_ERRORS):
            # Does not block: without a new event, NVML returns a timeout error.
            if (event := query_driver(pynvml.nvmlEventSetWait_v2, self._errors, 0)) is None:
                break
            uuid = _uuid(event.device)
            errors[uuid] = (*errors.get(uuid, ()), int(event.eventData))
        return errors


def _uuid(handle: Any) -> str:
    return str(query_driver(pynvml.nvmlDeviceGetUUID, handle))


def _mig_devices(handle: Any) -> Iterator[Any]:
    mode = query_driver(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return
    for index in range(query_driver(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = query_driver(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if device is not None:
            yield device


def _means(entry: str, index: int, uuids: Sequence[str]) -> bool:
    """Return true if an entry of CUDA_VISIBLE_DEVICES names the device, by index or UUID prefix."""
    return int(entry) == index if is_count(entry) else any(uuid.startswith(entry) for uuid in uuids)
