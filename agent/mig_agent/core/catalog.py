"""What each GPU model can be cut into, from our own files; the driver's answers win where it gives any."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from mig_agent.core.model import Layout, Profile

_MEMORY_TOLERANCE = 0.1
"""Drivers report a few per cent more or less for one model; a tenth apart is another model under the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model: its layout under every product name that the driver may give it."""

    product_names: tuple[str, ...]
    layout: Layout
    sources: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    """What was not captured from hardware, as sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The known models, looked up by what the driver reports of a GPU."""

    entries: tuple[CatalogEntry, ...] = ()

    def layout(self, model: str, memory_mib: int) -> Layout | None:
        """Return the layout of a GPU by product name and memory in MiB, or None if the model is unknown.

        The same arguments give the same object, so that tables kept by layout are found by identity.
        """
        entry = self.entry(model, memory_mib)
        return None if entry is None else _for_gpu(entry.layout, model, memory_mib)

    def entry(self, model: str, memory_mib: int) -> CatalogEntry | None:
        """Return the entry behind `layout`; of several with the name, the one nearest in memory."""
        wanted = model.casefold()
        named = [each for each in self.entries if any(name.casefold() == wanted for name in each.product_names)]
        near = [each for each in named if _apart(each.layout.memory_mib, memory_mib) <= _MEMORY_TOLERANCE]
        return min(near, key=lambda each: _apart(each.layout.memory_mib, memory_mib), default=None)


def _apart(known: int, given: int) -> float:
    return abs(known - given) / known


@lru_cache(maxsize=256)
def _for_gpu(layout: Layout, model: str, memory_mib: int) -> Layout:
    return replace(layout, model=model, memory_mib=memory_mib)


def full_size_profile(profiles: Iterable[Profile]) -> Profile | None:
    """Return the plain profile that takes the whole GPU, or else the largest; its engines are the GPU's totals."""
    everything = tuple(profiles)
    plain = [profile for profile in everything if not profile.attributes]
    return max(
        plain or everything,
        key=lambda profile: (profile.memory_slices, profile.compute_slices, profile.memory_mib),
        default=None,
    )


def profile_name(
    *, compute_slices: int, memory_mib: int, total_memory_mib: int, attribute: str = "", compute_only: int | None = None
) -> str:
    """Return the name that NVIDIA's tools make for a profile: `1g.10gb`, `3g.71gb`, `1g.5gb+me`, `1c.3g.20gb`.

    The memory in it is the GPU's in GiB, rounded up, times the profile's share in eighths, rounded half away from zero
    (70.5 gives 71). `attribute` has its sign. `compute_only` is the size of a compute instance in it, in slices.
    """
    share = math.ceil(memory_mib / total_memory_mib * 8) / 8
    gigabytes = math.floor(share * math.ceil(total_memory_mib / 1024) + 0.5)
    compute = f"{compute_only}c." if compute_only is not None and compute_only != compute_slices else ""
    return f"{compute}{compute_slices}g.{gigabytes}gb{attribute}"


def reconcile_layout(from_driver: Layout | None, from_file: Layout | None) -> tuple[Layout | None, tuple[str, ...]]:
    """Return the layout to work with and, as texts, how the driver's differs from the file's. The driver wins."""
    if from_driver is None:
        return from_file, ()
    if from_file is None or from_driver == from_file:
        return from_driver, ()
    differences = []
    if from_driver.memory_slices != from_file.memory_slices:
        differences.append(f"{from_driver.memory_slices} memory slices, {from_file.memory_slices} in the catalog")
    for profile in from_driver.profiles:
        known = from_file.by_id.get(profile.id)
        if known is None:
            differences.append(f"profile {profile.name} (id {profile.id}), which the catalog lacks")
        else:
            differences += _profile_differences(profile, known)
    differences += [
        f"no profile {known.name} (id {known.id}), which the catalog has"
        for known in from_file.profiles
        if known.id not in from_driver.by_id
    ]
    return from_driver, tuple(f"{from_driver.model}: the driver reports {words}" for words in differences)


def _profile_differences(profile: Profile, known: Profile) -> list[str]:
    compared = {
        "named": (profile.name, known.name),
        "with compute slices": (profile.compute_slices, known.compute_slices),
        "with memory slices": (profile.memory_slices, known.memory_slices),
        "with MiB": (profile.memory_mib, known.memory_mib),
        "with starts": (_starts(profile), _starts(known)),
        "with engines": (profile.engines.as_tuple(), known.engines.as_tuple()),
        "with attributes": (sorted(profile.attributes), sorted(known.attributes)),
    }
    return [
        f"profile {profile.name} (id {profile.id}) {what} {driver}, {file} in the catalog"
        for what, (driver, file) in compared.items()
        if driver != file
    ]


def _starts(profile: Profile) -> list[int]:
    return sorted(placement.start for placement in profile.placements)
