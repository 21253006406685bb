"""A GPU's Layout from the driver's own answers."""

from __future__ import annotations

import math
import re

from mig_agent.adapters.nvml.answers import ProfileAnswer
from mig_agent.adapters.nvml.calls import GPU_PROFILE_ENUMS, GpuHandle, Nvml
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Engines, Layout, Profile

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
    """All profiles of a GPU with their placements; None where the driver lists none now.

    None means a driver that lists profiles only in MIG mode, or a GPU that has no MIG. Raises DriverError on any other
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
    """The name that NVIDIA's tools make for a profile where an old driver gives none.

    The memory in it is the GPU's size in GiB, rounded up, times the profile's share in eighths, half away from zero: 3g
    of a GPU with 141 GiB is 71gb.
    """
    share = math.ceil(answer.memory_mib / total_mib * 8) / 8
    gigabytes = math.floor(share * math.ceil(total_mib / 1024) + 0.5)
    return f"{answer.slices}g.{gigabytes}gb{_ATTRIBUTE_OF_ENUM.get(enum, '')}"
