"""The node as the engine knows it, at three depths.

What is *put* here is committed. What is *published* is a finished, frozen value of what is committed, built on the
event loop at each publication; it is what everybody sees, and the only part that other threads may read. What is
*reserved* is laid over the committed part while a plan is being carried out, and is seen by the planner alone, so that
nothing is planned twice. Records never build on what is merely reserved: a failed commit needs nothing undone here but
its own reservations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from mig_agent.adapters.ledger.lease_evidence import EvidentLease, voided
from mig_agent.adapters.ledger.reader import Cordon, Doubt
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Instance,
    InstanceState,
    Layout,
    Lease,
    LeaseId,
    MigMode,
    NodeView,
)
from mig_agent.engine.thread_check import LoopBound


@dataclass(slots=True, kw_only=True)
class GpuRecord:
    """What is known of one GPU beside its instances."""

    index: int
    uuid: GpuUuid
    layout: Layout
    mode: MigMode
    minor: int | None = None
    cordon: Cordon | None = None
    """An administrator's, and recorded."""
    hung: str = ""
    """The driver's call that does not come back."""
    unreadable: str = ""
    """Why it cannot be read, again and again."""
    switching: str = ""
    """What is done to its mode at this moment."""
    lost: str = ""
    """Why the driver no longer answers for it."""
    instances: dict[Generation, Instance] = field(default_factory=dict)
    reserved: dict[Generation, Instance] = field(default_factory=dict)

    @property
    def trouble(self) -> str:
        """Why nothing can be placed on it now, found out by ourselves; empty when all is well."""
        return self.switching or self.hung or self.unreadable

    @property
    def state(self) -> GpuState:
        """What is done with it."""
        if self.lost:
            return GpuState.LOST
        if self.cordon is not None or self.trouble:
            return GpuState.CORDONED
        return GpuState.READY if self.mode.current else GpuState.WHOLE

    @property
    def reason(self) -> str:
        """Why it is not ready, in words."""
        if self.lost or self.trouble:
            return self.lost or self.trouble
        if self.cordon is not None:
            return self.cordon.reason
        if self.mode.current:
            return "" if self.mode.pending else "MIG mode goes off at the next reset"
        if not self.mode.capable:
            return "it has no MIG mode"
        if self.mode.pending:
            return "MIG mode comes on at the next reset"
        return f"MIG mode is off; `migctl mode enable --gpu {self.index}` turns it on"


class Signal:
    """Calls its subscribers, at once and in the order in which they subscribed. Use from the event loop."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call a function whenever the signal is emitted from now on; it must not raise."""
        self._subscribers.append(subscriber)

    def emit(self) -> None:
        """Call all subscribers."""
        for each in self._subscribers:
            each()


class State:
    """Holds all of it. Belongs to the event loop, except for `view`, which any thread may read."""

    def __init__(self, node: str, revision: int, last_generation: int) -> None:
        self.view_changed = Signal()
        """There is another view."""
        self.capacity_freed = Signal()
        """A request that waits may fit now: something was released, destroyed, found or uncordoned."""
        self.status_changed = Signal()
        """Something has changed that is published beside the view, such as the length of the queue."""
        self._node = node
        self.revision = revision
        self.gpus: dict[GpuUuid, GpuRecord] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._gpu_of: dict[Generation, GpuUuid] = {}
        self._unrecorded: set[Generation] = set()
        self.unmanaged: dict[Generation, GpuUuid] = {}
        """Of leases: instances as they were on record at the start. What is on a GPU that is not managed, or does not
        answer yet, is known from here alone."""
        self.doubt: Doubt | None = None
        """While there is one, what the ledger does not account for is nobody's to give or destroy."""
        self.former: dict[LeaseId, EvidentLease] = {}
        """While there is a doubt: leases of before, which their tokens may bring back."""
        self._last_generation = last_generation
        self._committed_gpus: dict[GpuUuid, Gpu] = {}
        self._working_gpus: dict[GpuUuid, Gpu] = {}
        self._frozen_leases: MappingProxyType[LeaseId, Lease] | None = None
        self._working: NodeView | None = None
        self.is_ahead = False
        """Whether something was changed that is not published yet."""
        self._view = NodeView(node=node, revision=revision, gpus=(), leases=MappingProxyType({}))

    # Looking

    @property
    def view(self) -> NodeView:
        """Return the node as last published: a finished value that any thread may read."""
        return self._view

    @property
    def working_view(self) -> NodeView:
        """What the planner sees: with the reservations."""
        if self._working is None:
            gpus = tuple(self._working_gpu(uuid) for uuid in self.gpus)
            # Not a copy: the planner looks at it at once, and only for the words of a refusal.
            leases = MappingProxyType(self._leases)
            self._working = NodeView(node=self._node, revision=self.revision, gpus=gpus, leases=leases)
        return self._working

    @property
    def leases(self) -> MappingProxyType[LeaseId, Lease]:
        """The leases that stand, as they are now."""
        return MappingProxyType(self._leases)

    def gpu(self, uuid: GpuUuid) -> Gpu:
        """Return a managed GPU as committed, published or not."""
        return self._committed_gpu(uuid)

    def instance(self, generation: Generation) -> Instance | None:
        """An instance as committed."""
        uuid = self._gpu_of.get(generation)
        return None if uuid is None else self.gpus[uuid].instances.get(generation)

    def instances_of(self, lease: LeaseId) -> Iterator[Instance]:
        """The instances of a lease that are still there."""
        known = self._leases.get(lease)
        for generation in known.instances if known is not None else ():
            instance = self.instance(generation)
            if instance is not None:
                yield instance

    def is_doubtful(self, generation: Generation) -> bool:
        """Return whether an instance that a restored ledger tells of may be another's by now."""
        return self.doubt is not None and generation <= self.doubt.generation

    def is_unrecorded(self, generation: Generation) -> bool:
        """Whether the ledger could not be told how this instance is now."""
        return generation in self._unrecorded

    # Changing

    def note_unrecorded(self, generation: Generation) -> None:
        """The ledger does not know yet how this instance is now."""
        self._unrecorded.add(generation)

    def note_recorded(self, generation: Generation) -> None:
        """The ledger knows."""
        self._unrecorded.discard(generation)

    def next_generation(self) -> Generation:
        """A number that no instance had before."""
        self._last_generation += 1
        return Generation(self._last_generation)

    def add_gpu(self, record: GpuRecord) -> None:
        """A GPU to be managed."""
        self.gpus[record.uuid] = record
        self._sort()
        self.touch(record.uuid)

    def renumber(self, gpu: GpuUuid, index: int) -> None:
        """Give a GPU the index that the driver counts it by now."""
        self.gpus[gpu].index = index
        self._sort()
        self.touch(gpu)

    def remove_gpu(self, gpu: GpuUuid) -> None:
        """A GPU that is not managed any more, with its instances; the leases stay."""
        for generation in self.gpus.pop(gpu).instances:
            self._gpu_of.pop(generation, None)
            self._unrecorded.discard(generation)
        self.touch(gpu)

    def touch(self, gpu: GpuUuid) -> None:
        """Note that the GPU's record was changed: everybody sees it from the next publication on."""
        self._committed_gpus.pop(gpu, None)
        self._working_gpus.pop(gpu, None)
        self._changed()

    def put(self, instance: Instance) -> None:
        """An instance as it is now."""
        gpu = instance.slot.gpu
        if self.former:
            before = self.gpus[gpu].instances.get(instance.generation)
            if before is not None and before.uuid != instance.uuid:
                self.void_former(before.uuid, "is gone")
            if instance.state is not InstanceState.FOREIGN and not self.is_doubtful(instance.generation):
                self.void_former(instance.uuid, "was taken over meanwhile, and may be another's by now")
        self.gpus[gpu].instances[instance.generation] = instance
        self._gpu_of[instance.generation] = gpu
        self.touch(gpu)

    def drop(self, generation: Generation) -> None:
        """An instance that is gone."""
        self._unrecorded.discard(generation)
        gpu = self._gpu_of.pop(generation, None)
        if gpu is not None:
            gone = self.gpus[gpu].instances.pop(generation, None)
            if self.former and gone is not None:
                self.void_former(gone.uuid, "is gone")
            self.gpus[gpu].reserved.pop(generation, None)
            self.touch(gpu)

    def settle_doubt(self) -> None:
        """Nothing is in doubt any more, and no lease of before comes back."""
        self.doubt = None
        self.former = {}

    def void_former(self, uuid: str, why: str) -> None:
        """No lease of before that had this device comes back: it is gone, or another's; `why` says it in words."""
        for each in tuple(voided(self.former.values(), uuid, f"its device {uuid} {why}")):
            self.former[each.lease.id] = each

    def put_lease(self, lease: Lease) -> None:
        """A lease as it is now."""
        self._leases[lease.id] = lease
        self._frozen_leases = None
        self._changed()

    def drop_lease(self, lease: LeaseId) -> None:
        """A lease that has ended."""
        self._leases.pop(lease, None)
        self._frozen_leases = None
        self._changed()

    def publish(self, revision: int) -> None:
        """Show everybody what is committed by now, as one new view of this revision."""
        if self._frozen_leases is None:
            self._frozen_leases = MappingProxyType(dict(self._leases))
        gpus = tuple(map(self._committed_gpu, self.gpus))
        view = NodeView(node=self._node, revision=revision, gpus=gpus, leases=self._frozen_leases)
        self.revision = revision
        self.is_ahead = False
        self._working = None
        self._view = view
        self.view_changed.emit()

    def reserve(self, instances: Iterable[Instance]) -> None:
        """Lays instances over what is committed, for the planner."""
        for instance in instances:
            gpu = instance.slot.gpu
            self.gpus[gpu].reserved[instance.generation] = instance
            self._working_gpus.pop(gpu, None)
        self._working = None

    def unreserve(self, instances: Iterable[Instance]) -> None:
        """Takes them off again."""
        for instance in instances:
            gpu = instance.slot.gpu
            if self.gpus[gpu].reserved.pop(instance.generation, None) is not None:
                self._working_gpus.pop(gpu, None)
        self._working = None

    # Building views: only what changed is built anew, and only on the event loop

    def _sort(self) -> None:
        self.gpus = dict(sorted(self.gpus.items(), key=lambda item: item[1].index))

    def _changed(self) -> None:
        self.is_ahead = True
        self._working = None

    def _committed_gpu(self, uuid: GpuUuid) -> Gpu:
        found = self._committed_gpus.get(uuid)
        if found is None:
            record = self.gpus[uuid]
            # One object for both views where they are alike: what the planner computed of it serves both.
            found = self._working_gpus.get(uuid) if not record.reserved else None
            if found is None:
                found = _frozen(record, record.instances.values())
            self._committed_gpus[uuid] = found
        return found

    def _working_gpu(self, uuid: GpuUuid) -> Gpu:
        found = self._working_gpus.get(uuid)
        if found is None:
            record = self.gpus[uuid]
            if record.reserved:
                found = _frozen(record, (record.instances | record.reserved).values())
            else:
                found = self._committed_gpu(uuid)
            self._working_gpus[uuid] = found
        return found


class CheckedState(LoopBound, State):
    """A State that fails where it is used off the event loop."""

    ON_ANY_THREAD: ClassVar[frozenset[str]] = frozenset({"view", "_view"})


def _frozen(record: GpuRecord, instances: Iterable[Instance]) -> Gpu:
    return Gpu(
        index=record.index,
        uuid=record.uuid,
        layout=record.layout,
        mode=record.mode,
        state=record.state,
        reason=record.reason,
        set_aside=bool(record.trouble) and not record.lost,
        minor=record.minor,
        instances=tuple(sorted(instances, key=_by_start)),
    )


def _by_start(instance: Instance) -> tuple[int, int]:
    return (instance.slot.placement.start, instance.generation)
