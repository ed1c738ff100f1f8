"""The GPUs of this machine, as the driver counts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hpctrain.cluster.devices import visible_devices
from hpctrain.telemetry.gpu_reading import GpuReading, ask, part_of, read_gpu

#: Errors that are taken in at once: a GPU that is broken may report without an end.
_MOST_ERRORS = 100


def count_gpus(environ: Mapping[str, str]) -> int:
    """The number of GPUs that processes with these variables can use; 0 where there is no driver."""
    return count_visible(installed_gpus(), visible_devices(environ))


def count_visible(installed: Sequence[str], listed: Sequence[str] | None) -> int:
    """How many of the devices in `listed`, where None stands for all, there are before the first that is not.

    Args:
        installed: UUIDs of the GPUs that are there.
        listed: what `visible_devices` read. Whether a part of a GPU is there is not looked at.
    """
    if listed is None:
        return len(installed)
    number = 0
    for entry in listed if installed else ():
        is_there = (
            int(entry) < len(installed)
            if entry.isdecimal()
            else entry.startswith("MIG-") or any(uuid.startswith(entry) for uuid in installed)
        )
        if not is_there:
            break
        number += 1
    return number


def installed_gpus() -> list[str]:
    """UUIDs of the GPUs that this process may open, in the driver's order."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    uuids = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                uuids.append(str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))))
            except pynvml.NVMLError:
                continue  # another job's, fenced off by a cgroup
    finally:
        pynvml.nvmlShutdown()
    return uuids


@dataclass(frozen=True)
class DriverFacts:
    """What the driver of this machine says of itself and of its GPUs."""

    version: str | None = None
    """None where there is no driver."""
    cuda: str | None = None
    """The newest CUDA that it knows."""
    names: list[str] = field(default_factory=list)
    """The GPUs that this process may open, in the driver's order."""


def driver_facts() -> DriverFacts:
    """What the driver says; a driver that hangs hangs its caller, too."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DriverFacts()
    names = []
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                names.append(str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))))
            except pynvml.NVMLError:
                continue  # another job's, fenced off by a cgroup
        # An integer such as 12040 (nvmlSystemGetCudaDriverVersion).
        return DriverFacts(
            str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", names
        )
    finally:
        pynvml.nvmlShutdown()


class GpuReader:
    """Reads the GPUs that this process may open, as long as it is open. Use as a context manager.

    Of a GPU in parts (MIG), the parts are read: of these the driver tells the memory only, and what is of
    the whole GPU, such as its power, is told of each part. Without a driver there is no GPU.
    """

    def __init__(self, listed: Sequence[str] | None = None) -> None:
        """Read those that `visible_devices` lists; None reads all."""
        self._listed = listed
        # A part, or the GPU itself, and the GPU.
        self._handles: list[tuple[Any, Any]] = []
        self._is_open = False
        self._errors: Any = None

    def __enter__(self) -> Self:
        try:
            import pynvml
        except ImportError:  # An image of a container may hold no more than Python and PyTorch.
            return self
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return self
        self._is_open = True
        for index in range(ask(pynvml.nvmlDeviceGetCount) or 0):
            if (handle := ask(pynvml.nvmlDeviceGetHandleByIndex, index)) is None:
                continue  # another job's, fenced off by a cgroup
            for part in list(_parts(handle)) or [handle]:
                uuids = [_uuid(each) for each in (handle, part)]
                if self._listed is None or any(_means(entry, index, uuids) for entry in self._listed):
                    self._handles.append((part, handle))
        self._errors = _listen_for_errors([whole for _, whole in self._handles])
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            import pynvml

            if self._errors is not None:
                ask(pynvml.nvmlEventSetFree, self._errors)
            ask(pynvml.nvmlShutdown)
        self._handles, self._is_open, self._errors = [], False, None

    @property
    def names(self) -> list[str]:
        """The kind of each."""
        if not self._handles:
            return []
        import pynvml

        return [str(ask(pynvml.nvmlDeviceGetName, handle)) for handle, _ in self._handles]

    @property
    def memory_bytes(self) -> list[int | None]:
        """How much memory each has."""
        if not self._handles:
            return []
        import pynvml

        return [part_of(ask(pynvml.nvmlDeviceGetMemoryInfo, handle), "total") for handle, _ in self._handles]

    def read(self, *, traffic: bool = False) -> list[GpuReading]:
        """What each says now.

        Args:
            traffic: ask for that over PCIe and NVLink, too, which takes the driver 40 ms a GPU.
        """
        xids = self._new_errors()
        return [
            read_gpu(handle, whole, xids=xids.get(_uuid(whole), ()), traffic=traffic)
            for handle, whole in self._handles
        ]

    def _new_errors(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the errors that the driver has reported since the last call, by the GPU's UUID."""
        errors: dict[str, tuple[int, ...]] = {}
        if self._errors is None:
            return errors
        import pynvml

        for _ in range(_MOST_ERRORS):
            # Does not wait: what has not happened yet is an error of another kind, a timeout.
            if (event := ask(pynvml.nvmlEventSetWait_v2, self._errors, 0)) is None:
                break
            uuid = _uuid(event.device)
            errors[uuid] = (*errors.get(uuid, ()), int(event.eventData))
        return errors


def _listen_for_errors(handles: Sequence[Any]) -> Any:
    """What collects the errors that the driver reports of these GPUs; None where it reports none."""
    import pynvml

    if not handles or (errors := ask(pynvml.nvmlEventSetCreate)) is None:
        return None
    for handle in handles:
        ask(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, errors)
    return errors


def _uuid(handle: Any) -> str:
    import pynvml

    return str(ask(pynvml.nvmlDeviceGetUUID, handle))


def _parts(handle: Any) -> Iterator[Any]:
    """The parts of a GPU that is in parts."""
    import pynvml

    mode = ask(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return
    for index in range(ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        if (part := ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)) is not None:
            yield part


def _means(entry: str, index: int, uuids: Sequence[str]) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES names a device: by its number, or by the start of its UUID."""
    return int(entry) == index if entry.isdecimal() else any(uuid.startswith(entry) for uuid in uuids)
