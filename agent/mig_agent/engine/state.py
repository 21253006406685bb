"""The node's state in memory: committed, published and reserved.

What is *put* here is committed. What is *published* is a finished, frozen value of what is committed, built on the
event loop at each publication; it is what clients see, and the only part that other threads may read. What is
*reserved* lies over the committed part while a plan is being carried out, and only the planner sees it, so that no
slice is planned twice. Records never build on reservations: a failed commit has nothing to undo here except its own
reservations.
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
from mig_agent.core.observation import ProcessUsage
from mig_agent.engine.thread_check import LoopBound


@dataclass(slots=True, kw_only=True)
class GpuRecord:
    """Holds what is known of one GPU, with its committed and its reserved instances."""

    index: int
    uuid: GpuUuid
    layout: Layout
    mode: MigMode
    minor: int | None = None
    cordon: Cordon | None = None
    """The cordon that an administrator asked for, as recorded; None where there is none."""
    hung: str = ""
    """The driver call that has not returned in time, as a message; empty when there is none."""
    unreadable: str = ""
    """Why reading it has failed several times in a row; empty when it can be read."""
    switching: str = ""
    """The change of its MIG mode that is in progress, as a message; empty when there is none."""
    not_shared: str = ""
    """Why a GPU without MIG mode is not shared, as a phrase; empty if it is, or is not meant to be."""
    others: tuple[ProcessUsage, ...] = ()
    """The processes that used no share of a GPU without MIG mode when it was read last."""
    lost: str = ""
    """The driver's report that the GPU is lost, as a message; empty while it is not."""
    instances: dict[Generation, Instance] = field(default_factory=dict)
    reserved: dict[Generation, Instance] = field(default_factory=dict)

    @property
    def trouble(self) -> str:
        """The reason why the agent places nothing on the GPU now; empty when it can. Not an administrator's cordon."""
        return self.switching or self.hung or self.unreadable

    @property
    def state(self) -> GpuState:
        """The GPU's state, as clients see it."""
        if self.lost:
            return GpuState.LOST
        if self.cordon is not None or self.trouble:
            return GpuState.CORDONED
        return GpuState.READY if self.mode.current else GpuState.WHOLE

    @property
    def reason(self) -> str:
        """The reason why the GPU is not ready, as a message; empty when it is."""
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
        # It cannot be switched on while there are leases.
        is_leased = any(each.state is InstanceState.LEASED for each in self.instances.values())
        return "MIG mode is off" + ("" if is_leased else f"; `migctl mode enable --gpu {self.index}` turns it on")


class Signal:
    """Calls its subscribers, at once and in the order in which they subscribed.

    Not thread-safe; use from the event loop.
    """

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
    """Holds GPUs, instances and leases: committed, published and reserved.

    Not thread-safe; use from the event loop, except for `view`, which any thread may read.
    """

    def __init__(self, node: str, revision: int, last_generation: int) -> None:
        self.view_changed = Signal()
        """Emitted when a new view was published."""
        self.capacity_freed = Signal()
        """Emitted when a waiting request may fit now: something was released, destroyed, found or uncordoned."""
        self.status_changed = Signal()
        """Emitted when something changed that is published beside the view, such as the length of the queue."""
        self._node = node
        self.revision = revision
        self.gpus: dict[GpuUuid, GpuRecord] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._gpu_of: dict[Generation, GpuUuid] = {}
        self._unrecorded: set[Generation] = set()
        self.unmanaged: dict[Generation, GpuUuid] = {}
        """The GPU of each leased instance, as recorded when the agent started: for an instance on a GPU that is not
        managed, or does not answer yet, the only source."""
        self.doubt: Doubt | None = None
        """Why the ledger may not account for everything that is leased: while it is set, instances that the ledger does
        not account for are neither leased nor destroyed. None where the ledger is complete."""
        self.former: dict[LeaseId, EvidentLease] = {}
        """While `doubt` is set: leases of the lost ledger, which their holders may recover by their tokens."""
        self._last_generation = last_generation
        self._committed_gpus: dict[GpuUuid, Gpu] = {}
        self._working_gpus: dict[GpuUuid, Gpu] = {}
        self._frozen_leases: MappingProxyType[LeaseId, Lease] | None = None
        self._working: NodeView | None = None
        self.is_ahead = False
        """Whether there are changes that are not published yet."""
        self._view = NodeView(node=node, revision=revision, gpus=(), leases=MappingProxyType({}))

    # Reading

    @property
    def view(self) -> NodeView:
        """Return the node as last published: a finished value that any thread may read."""
        return self._view

    @property
    def working_view(self) -> NodeView:
        """The node as the planner sees it: committed, published or not, with the reservations on top."""
        if self._working is None:
            gpus = tuple(self._working_gpu(uuid) for uuid in self.gpus)
            # Not a copy: the planner reads it at once, and only for the message of a refusal.
            leases = MappingProxyType(self._leases)
            self._working = NodeView(node=self._node, revision=self.revision, gpus=gpus, leases=leases)
        return self._working

    @property
    def leases(self) -> MappingProxyType[LeaseId, Lease]:
        """The active leases as committed, published or not."""
        return MappingProxyType(self._leases)

    def gpu(self, uuid: GpuUuid) -> Gpu:
        """Return a managed GPU as committed, published or not."""
        return self._committed_gpu(uuid)

    def instance(self, generation: Generation) -> Instance | None:
        """Return an instance as committed; None where there is none of this generation."""
        uuid = self._gpu_of.get(generation)
        return None if uuid is None else self.gpus[uuid].instances.get(generation)

    def instances_of(self, lease: LeaseId) -> Iterator[Instance]:
        """Yield the instances of an active lease that still exist."""
        known = self._leases.get(lease)
        for generation in known.instances if known is not None else ():
            instance = self.instance(generation)
            if instance is not None:
                yield instance

    def is_doubtful(self, generation: Generation) -> bool:
        """Return whether another lease may have this instance by now: a restored ledger does not know."""
        return self.doubt is not None and generation <= self.doubt.generation

    def is_unrecorded(self, generation: Generation) -> bool:
        """Return whether the ledger does not have this instance as it is now, since a commit failed or is pending."""
        return generation in self._unrecorded

    # Writing

    def note_unrecorded(self, generation: Generation) -> None:
        """Note that the ledger does not have this instance as it is now."""
        self._unrecorded.add(generation)

    def note_recorded(self, generation: Generation) -> None:
        """Note that the ledger has this instance as it is now."""
        self._unrecorded.discard(generation)

    def next_generation(self) -> Generation:
        """Return a generation number that no instance had before."""
        self._last_generation += 1
        return Generation(self._last_generation)

    def add_gpu(self, record: GpuRecord) -> None:
        """Put a GPU under management."""
        self.gpus[record.uuid] = record
        self._sort()
        self.touch(record.uuid)

    def renumber(self, gpu: GpuUuid, index: int) -> None:
        """Set a GPU's index to the one that the driver has for it now."""
        self.gpus[gpu].index = index
        self._sort()
        self.touch(gpu)

    def remove_gpu(self, gpu: GpuUuid) -> None:
        """Stop managing a GPU: it and its instances are removed, its leases stay active."""
        for generation in self.gpus.pop(gpu).instances:
            self._gpu_of.pop(generation, None)
            self._unrecorded.discard(generation)
        self.touch(gpu)

    def touch(self, gpu: GpuUuid) -> None:
        """Note that a GPU's record was changed: the next published view shows it."""
        self._committed_gpus.pop(gpu, None)
        self._working_gpus.pop(gpu, None)
        self._changed()

    def put(self, instance: Instance) -> None:
        """Add an instance, or replace the one of its generation."""
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
        """Remove an instance that no longer exists; does nothing if it is not known."""
        self._unrecorded.discard(generation)
        gpu = self._gpu_of.pop(generation, None)
        if gpu is not None:
            gone = self.gpus[gpu].instances.pop(generation, None)
            if self.former and gone is not None:
                self.void_former(gone.uuid, "is gone")
            self.gpus[gpu].reserved.pop(generation, None)
            self.touch(gpu)

    def settle_doubt(self) -> None:
        """End the doubt about the ledger: no lease of the lost ledger can be recovered from now on."""
        self.doubt = None
        self.former = {}

    def void_former(self, uuid: str, why: str) -> None:
        """Void the leases of the lost ledger that had this device; `why` completes "its device ..."."""
        for each in tuple(voided(self.former.values(), uuid, f"its device {uuid} {why}")):
            self.former[each.lease.id] = each

    def put_lease(self, lease: Lease) -> None:
        """Add a lease, or replace the one of its id."""
        self._leases[lease.id] = lease
        self._frozen_leases = None
        self._changed()

    def drop_lease(self, lease: LeaseId) -> None:
        """Remove a lease that has ended; does nothing if it is not known."""
        self._leases.pop(lease, None)
        self._frozen_leases = None
        self._changed()

    def publish(self, revision: int) -> None:
        """Publish what is committed by now as one new view with this revision."""
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
        """Lay instances over what is committed, for the planner."""
        for instance in instances:
            gpu = instance.slot.gpu
            self.gpus[gpu].reserved[instance.generation] = instance
            self._working_gpus.pop(gpu, None)
        self._working = None

    def unreserve(self, instances: Iterable[Instance]) -> None:
        """Remove reservations that `reserve` has made."""
        for instance in instances:
            gpu = instance.slot.gpu
            if self.gpus[gpu].reserved.pop(instance.generation, None) is not None:
                self._working_gpus.pop(gpu, None)
        self._working = None

    # Building views: only what changed is built again, and only on the event loop

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
        draining=record.cordon is not None and record.cordon.draining,
        not_shared=record.not_shared,
        drain_until=None if record.cordon is None else record.cordon.drain_until,
        instances=tuple(sorted(instances, key=_by_start)),
    )


def _by_start(instance: Instance) -> tuple[int, int]:
    return (instance.slot.placement.start, instance.generation)
