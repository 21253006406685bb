"""The writes that turn the slices which the API server has into those wanted: none where nothing changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mig_agent.core.dra.pool import ResourceSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSlice:
    """A slice as the API server has it."""

    content: ResourceSlice
    generation: int
    """The generation of the pool that the slice belongs to."""
    slice_count: int
    """The number of slices in that generation of the pool."""

    @property
    def object_name(self) -> str:
        """The name of the object. Generations have objects of their own, in the same order."""
        return f"{self.content.name}-{self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relisting:
    """The changes to make, in their order: writes, then deletions. After a crash between two the rest is found again.

    Writes of counters come first: they keep the scheduler from giving out what is held outside DRA.
    """

    writes: tuple[PublishedSlice, ...] = ()
    """Slices to create or replace."""
    deletions: tuple[str, ...] = ()
    """Names of objects that no longer belong to the pool."""


def relist(published: Sequence[PublishedSlice], wanted: Sequence[ResourceSlice]) -> Relisting:
    """Return the changes that make the API server's slices the wanted ones.

    Changes of order and counters are made in place, one slice at a time. If slices hold other devices than before, all
    are created as a new generation beside the old one, which is deleted when the new one is complete: so no device that
    a claim has is ever missing. Until the last one is created, the scheduler sees an incomplete pool and allocates
    nothing from it.
    """
    generation = max((each.generation for each in published), default=1)
    newest = {each.content.name: each for each in published if each.generation == generation}
    if not _can_be_changed_in_place(newest, wanted):
        generation, newest = generation + 1, {}
    due = (PublishedSlice(content=each, generation=generation, slice_count=len(wanted)) for each in wanted)
    return Relisting(
        writes=tuple(each for each in due if newest.get(each.content.name) != each),
        deletions=tuple(sorted(each.object_name for each in published if each.generation != generation)),
    )


def _can_be_changed_in_place(newest: Mapping[str, PublishedSlice], wanted: Sequence[ResourceSlice]) -> bool:
    """Return True if the newest generation is the wanted one, or the part of it that was written before a crash."""
    members = {each.name: each.members for each in wanted}
    return all(
        members.get(name) == each.content.members and each.slice_count == len(wanted) for name, each in newest.items()
    )
