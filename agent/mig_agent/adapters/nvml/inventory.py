"""The GPUs that the driver knows: their handles, MIG modes and layouts."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass

from mig_agent.adapters.nvml.calls import GPU_PROFILE_ENUMS, GpuHandle, Nvml, ProfileAnswer
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Engines, GpuUuid, Layout, MigMode, Profile

_ATTRIBUTE = re.compile(r"[+-][a-z][a-z.]*")
_ATTRIBUTE_OF_ENUM = {
    7: "+me",
    8: "+me",
    10: "+gfx",
    11: "+gfx",
    12: "+gfx",
    13: "-me",
    14: "-me",
    15: "+me.all",
    16: "+me.all",
    17: "+gfx",
}


def read_layout(nvml: Nvml, gpu: GpuHandle, index: int, *, model: str, memory_mib: int) -> Layout | None:
    """Read all profiles of a GPU with their placements; return None if the driver lists none now.

    None means a driver that lists profiles only in MIG mode, or a GPU without MIG. Raises DriverError on any other
    failure.
    """
    profiles = []
    for enum in GPU_PROFILE_ENUMS:
        try:
            answer = nvml.profile(gpu, enum, index)
            placements = nvml.placements(gpu, answer.id, index)
        except DriverError as error:
            # NOT_SUPPORTED: this GPU has no such profile. INVALID_ARGUMENT: this driver does not know the enum.
            if error.kind in {DriverErrorKind.NOT_SUPPORTED, DriverErrorKind.INVALID_ARGUMENT}:
                continue
            raise
        if not placements:
            continue
        name = answer.name or profile_name(enum, answer, memory_mib)
        profiles.append(
            Profile(
                id=answer.id,
                name=name,
                compute_slices=answer.slices,
                memory_slices=placements[0].size,
                memory_mib=answer.memory_mib,
                placements=placements,
                engines=_engines(answer),
                attributes=frozenset(_ATTRIBUTE.findall(name)),
            )
        )
    if not profiles:
        return None
    plain = [profile for profile in profiles if not profile.attributes]
    full = max(plain or profiles, key=lambda profile: (profile.memory_slices, profile.compute_slices))
    return Layout(
        model=model,
        memory_slices=max(place.start + place.size for profile in profiles for place in profile.placements),
        memory_mib=memory_mib,
        profiles=tuple(profiles),
        engines=full.engines,
    )


def _engines(answer: ProfileAnswer) -> Engines:
    return Engines(
        multiprocessors=answer.multiprocessors,
        copy=answer.copy_engines,
        decoders=answer.decoders,
        encoders=answer.encoders,
        jpeg=answer.jpeg,
        ofa=answer.ofa,
    )


def profile_name(enum: int, answer: ProfileAnswer, total_mib: int) -> str:
    """Return the name that NVIDIA's tools make for a profile whose name an old driver does not report.

    The memory in it is the GPU's size in GiB, rounded up, times the profile's share in eighths, half away from zero: 3g
    of a GPU with 141 GiB is 71gb.
    """
    share = math.ceil(answer.memory_mib / total_mib * 8) / 8
    gigabytes = math.floor(share * math.ceil(total_mib / 1024) + 0.5)
    return f"{answer.slices}g.{gigabytes}gb{_ATTRIBUTE_OF_ENUM.get(enum, '')}"


_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """Facts of a GPU that stay true during a session and while its MIG mode is the same."""

    handle: GpuHandle
    index: int
    uuid: GpuUuid
    model: str
    memory_mib: int


class Inventory:
    """Looks each GPU up once and keeps the result. Thread-safe; every method may raise DriverError."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._mutex = threading.Lock()
        self._known: dict[int, KnownGpu] = {}
        self._layouts: dict[GpuUuid, Layout] = {}
        self._capable: set[GpuUuid] = set()

    def forget_all(self) -> None:
        """Forget all GPUs for a new session: handles are new, and the GPUs may be others."""
        with self._mutex:
            self._known.clear()
            self._layouts.clear()

    def count(self) -> int:
        """Return the number of GPUs, lost ones included."""
        return self._nvml.gpu_count()

    def at(self, index: int) -> KnownGpu:
        """Return the GPU with this index."""
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
        """Return the GPU with this UUID. Raises NOT_FOUND if no GPU that answers has it."""
        with self._mutex:
            for known in self._known.values():
                if known.uuid == gpu:
                    return known
        for index in range(self.count()):
            try:
                known = self.at(index)
            except DriverError:
                continue  # it was lost before its UUID was read
            if known.uuid == gpu:
                return known
        raise DriverError(DriverErrorKind.NOT_FOUND, "nvmlDeviceGetHandleByIndex", detail=f"no GPU {gpu}")

    def forget(self, known: KnownGpu) -> None:
        """Look the GPU up again next time."""
        with self._mutex:
            self._known.pop(known.index, None)

    def forget_layout(self, known: KnownGpu) -> None:
        """Read the GPU's profiles again next time."""
        with self._mutex:
            self._layouts.pop(known.uuid, None)

    def mode(self, known: KnownGpu) -> MigMode:
        """Return the MIG mode now and after the next reset."""
        try:
            current, pending = self._nvml.mig_mode(known.handle, known.index)
        except DriverError as error:
            # No GPU loses the capability: if it had it, this error is a fault.
            if error.kind is DriverErrorKind.NOT_SUPPORTED and known.uuid not in self._capable:
                return MigMode(capable=False)
            raise
        self._capable.add(known.uuid)
        return MigMode(capable=True, current=current, pending=pending)

    def layout(self, known: KnownGpu) -> Layout | None:
        """Return the GPU's profiles and placements; None if the driver reports none, now or ever."""
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
