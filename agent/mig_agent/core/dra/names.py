"""The names of the DRA driver, its pool, its slices, devices and counters, within the limits of the API server.

Names of devices and counter sets are DNS labels made of the GPU's UUID, never of its index: an allocation outlives a
reboot, after which a GPU may have another index.
"""

from __future__ import annotations

import re
from typing import Final

from mig_agent.core.model import GpuUuid, Slot

DRIVER: Final = "mig-agent.io"
"""The driver's name in slices, claims and CEL: `device.capacity['mig-agent.io'].memory`."""
ENGINE_COUNTERS: Final = (
    "multiprocessors",
    "copy-engines",
    "decoders",
    "encoders",
    "jpeg-engines",
    "ofa-engines",
)
"""The names of the counters of engines, in the order of the fields of `Engines`."""
_NOT_IN_LABELS = re.compile(r"[^a-z0-9]+")


def pool_name(node: str) -> str:
    """Return the name of a node's pool.

    It is not the bare node name, since the scheduler keeps counters by the name of the pool without the driver's, and
    other drivers use the node's.
    """
    return f"{DRIVER}/{node}"


def slice_name(node: str, number: int) -> str:
    """Return the name of a node's slice of devices; the scheduler tries slices in the order of their names."""
    return f"{node}-{DRIVER}-{number:04}"


def counter_slice_name(node: str, number: int) -> str:
    """Return the name of a node's slice of counters."""
    return f"{node}-{DRIVER}-counters-{number:04}"


def counter_set_name(gpu: GpuUuid) -> str:
    """Return the name of a GPU's counter set: `gpu-8f0c...`."""
    return _label(gpu)


def device_name(slot: Slot) -> str:
    """Return the name of a slot's device: the GPU's UUID, the profile and the first memory slice.

    `+me` becomes `-me` and `-me` becomes `-no-me`, so that two profiles never share a name.
    """
    profile = _label(slot.profile.name.replace("-", "-no-"))
    return f"{_label(slot.gpu)}-{profile}-{slot.placement.start}"


def memory_slice_counter(number: int) -> str:
    """Return the name of the counter of a memory slice."""
    return f"memory-slice-{number}"


def _label(text: str) -> str:
    return _NOT_IN_LABELS.sub("-", text.lower()).strip("-")
