"""The GPUs that the driver knows: their handles, modes and layouts."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mig_agent.adapters.nvml.calls import GpuHandle, Nvml
from mig_agent.adapters.nvml.layouts import read_layout
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid, Layout, MigMode

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """What stays true of a GPU as long as the library is open and its MIG mode the same."""

    handle: GpuHandle
    index: int
    uuid: GpuUuid
    model: str
    memory_mib: int


class Inventory:
    """Looks GPUs up once and keeps them. Thread-safe; every method may raise DriverError."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._mutex = threading.Lock()
        self._known: dict[int, KnownGpu] = {}
        self._layouts: dict[GpuUuid, Layout] = {}
        self._capable: set[GpuUuid] = set()

    def forget_all(self) -> None:
        """A new session with the driver: handles are others, and so may the GPUs be."""
        with self._mutex:
            self._known.clear()
            self._layouts.clear()

    def count(self) -> int:
        """GPUs, lost ones included."""
        return self._nvml.gpu_count()

    def at(self, index: int) -> KnownGpu:
        """The GPU with this index."""
        with self._mutex:
            known = self._known.get(index)
        if known is None:
            handle = self._nvml.gpu(index)
            known = KnownGpu(
                handle=handle,
                index=index,
                uuid=GpuUuid(self._nvml.uuid(handle, index)),
                model=self._nvml.name(handle, index),
                memory_mib=self._nvml.memory(handle, index).total // _MIB,
            )
            with self._mutex:
                self._known[index] = known
        return known

    def find(self, gpu: GpuUuid) -> KnownGpu:
        """The GPU with this UUID; NOT_FOUND where no GPU that answers has it."""
        with self._mutex:
            for known in self._known.values():
                if known.uuid == gpu:
                    return known
        for index in range(self.count()):
            try:
                known = self.at(index)
            except DriverError:
                continue  # it was lost before anybody knew its UUID
            if known.uuid == gpu:
                return known
        raise DriverError(DriverErrorKind.NOT_FOUND, "nvmlDeviceGetHandleByIndex", detail=f"no GPU {gpu}")

    def forget(self, known: KnownGpu) -> None:
        """Looks the GPU up anew next time."""
        with self._mutex:
            self._known.pop(known.index, None)

    def forget_layout(self, known: KnownGpu) -> None:
        """Reads the GPU's profiles anew next time."""
        with self._mutex:
            self._layouts.pop(known.uuid, None)

    def mode(self, known: KnownGpu) -> MigMode:
        """MIG mode now and after the next reset."""
        try:
            current, pending = self._nvml.mig_mode(known.handle, known.index)
        except DriverError as error:
            # No GPU loses the ability: one that had it is in trouble now.
            if error.kind is DriverErrorKind.NOT_SUPPORTED and known.uuid not in self._capable:
                return MigMode(capable=False)
            raise
        self._capable.add(known.uuid)
        return MigMode(capable=True, current=current, pending=pending)

    def layout(self, known: KnownGpu) -> Layout | None:
        """What the GPU can be cut into; None where the driver does not say, now or ever."""
        with self._mutex:
            layout = self._layouts.get(known.uuid)
        if layout is None:
            layout = read_layout(self._nvml, known.handle, known.index, model=known.model, memory_mib=known.memory_mib)
            if layout is not None:
                with self._mutex:
                    # GPUs of one model share one object, so that tables kept by layout are found by identity.
                    layout = next((each for each in self._layouts.values() if each == layout), layout)
                    self._layouts[known.uuid] = layout
        return layout
