"""Compares ledger and hardware and returns the repairs as values, without side effects.

The hardware is the truth about instances, the ledger about leases. Called at start, after an error, on a driver event
and on a slow timer. After the repairs are carried out, comparing again returns none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mig_agent.core.model import DeviceKind, Generation, GpuUuid, InstanceState, LeaseId, Placement
from mig_agent.core.observation import ObservedGpu, ObservedInstance

REBOOT = "reboot"
"""The machine was rebooted: no instance outlives that."""
INSTANCE_LOST = "instance-lost"
"""It was destroyed, replaced or changed by another program than the agent."""
GPU_RESET = "gpu-reset"
"""All instances of its GPU are missing: a reset, or somebody destroyed them all; no call can tell which."""
LIMIT_LOST = "limit-lost"
"""The memory limit of a share does not hold any more: what enforced it has ended or was changed."""
NEVER_MADE = "never-made"
"""The agent stopped while it was creating the instance; no caller got it."""
DESTROYED = "destroyed"
"""The agent stopped while it was destroying the instance, and it no longer exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedInstance:
    """An instance as recorded in the ledger."""

    generation: Generation
    gpu: GpuUuid
    kind: DeviceKind
    profile_id: int
    placement: Placement
    state: InstanceState
    gpu_instance_id: int | None = None
    """None until the driver assigned one; always None for a kind that the driver does not list."""
    compute_instance_id: int | None = None
    uuid: str = ""
    lease: LeaseId | None = None
    """The lease that holds it; set already while it is being created for that lease."""
    answered: bool | None = None
    """True if the lease was committed as granted, so that its holder may know of it.

    None: implied by the state, which is no for `creating` and yes for `leased`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The ledger at one moment."""

    boot_id: str
    """The boot in which it was written; empty for a new ledger."""
    instances: tuple[RecordedInstance, ...] = ()
    leases: tuple[LeaseId, ...] = ()
    """All leases that have not ended."""
    of_pods: frozenset[LeaseId] = frozenset()
    """Leases of pods, which go on with the devices that are left.

    A container keeps its device nodes even if a device is lost. Any other lease ends with its first loss.
    """
    beside: frozenset[LeaseId] = frozenset()
    """Leases that have further instances which are not listed here."""
    doubtful_up_to: int = 0
    """The ledger may lack what happened up to this generation; 0 if it accounts for everything.

    Instances up to it may belong to somebody else by now: none of them is ever destroyed.
    """


@dataclass(frozen=True, slots=True)
class EndLostLease:
    """The lease must end. As with every end of a lease, those of its instances that still exist become idle."""

    lease: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class LoseDevice:
    """An instance of a pod's lease is lost; the lease goes on with the others until the pod ends."""

    lease: LeaseId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetInstance:
    """An instance of the agent no longer exists, or was never created."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class AdoptForeign:
    """An instance found on the hardware that the ledger lacks: record it as foreign."""

    gpu: GpuUuid
    observed: ObservedInstance


@dataclass(frozen=True, slots=True)
class ForgetForeign:
    """A foreign instance no longer exists."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class FinishDestroy:
    """An instance of the agent is incomplete, being created or destroyed: remove what is left of it, then forget it."""

    gpu: GpuUuid
    gpu_instance_id: int
    profile_id: int
    placement: Placement
    generation: Generation


@dataclass(frozen=True, slots=True)
class EndShare:
    """A share has no lease, is only half made or lost its limit: end what is left of it, then forget it."""

    generation: Generation
    lost: str = ""
    """Why its limit does not hold any more, as a phrase; empty if it does, or never did."""


@dataclass(frozen=True, slots=True)
class MarkIdle:
    """An instance of the agent is complete and without a lease: idle, whatever its recorded state."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class MarkLeased:
    """An instance of the agent is complete, and its lease was granted: leased."""

    generation: Generation
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class UpdateIds:
    """The ledger lacks the driver's ids of an instance of the agent, or its device's UUID changed."""

    generation: Generation
    gpu_instance_id: int
    compute_instance_id: int | None
    uuid: str


Repair = (
    EndLostLease
    | LoseDevice
    | ForgetInstance
    | AdoptForeign
    | ForgetForeign
    | FinishDestroy
    | EndShare
    | MarkIdle
    | MarkLeased
    | UpdateIds
)


def reconcile(recorded: Recorded, observed: Sequence[ObservedGpu], boot_id: str) -> tuple[Repair, ...]:
    """Return the repairs that make the ledger agree with the hardware; empty if it does.

    The records of a GPU that is not among the observed stay as they are. Leases end first, then missing instances are
    forgotten, then those found are recorded.
    """
    if recorded.boot_id and recorded.boot_id != boot_id:
        return _after_reboot(recorded, observed)
    comparison = _Comparison(recorded)
    for gpu in observed:
        comparison.compare_gpu(gpu)
    comparison.end_leases_without_instances()
    return comparison.repairs()


def _after_reboot(recorded: Recorded, observed: Sequence[ObservedGpu]) -> tuple[Repair, ...]:
    held = (each.lease for each in recorded.instances if each.lease is not None)
    leases = dict.fromkeys((*recorded.leases, *held))
    return (
        *(EndLostLease(lease, REBOOT) for lease in leases),
        *(
            ForgetForeign(each.generation)
            if each.state is InstanceState.FOREIGN
            else ForgetInstance(each.generation, REBOOT)
            for each in recorded.instances
        ),
        # The agent's instances are gone, so another program has created what exists now.
        *(AdoptForeign(gpu.uuid, instance) for gpu in observed for instance in gpu.instances),
    )


class _Comparison:
    """Collects the repairs of one comparison."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._ended: dict[LeaseId, str] = {}
        self._lost: list[LoseDevice] = []
        self._gone: list[Repair] = []
        self._kept: list[Repair] = []
        self._found: list[Repair] = []
        self._why_gone = INSTANCE_LOST

    def repairs(self) -> tuple[Repair, ...]:
        going_on = self._going_on()
        ended = dict(self._ended)
        for each in self._lost:
            if each.lease not in going_on:
                ended.setdefault(each.lease, each.reason)
        return (
            *(EndLostLease(lease, reason) for lease, reason in ended.items()),
            *(each for each in self._lost if each.lease in going_on),
            *self._gone,
            *self._kept,
            *self._found,
        )

    def _going_on(self) -> frozenset[LeaseId]:
        """Return the leases of pods that still have a device."""
        gone = {each.generation for each in self._lost}
        left = {each.lease for each in self._recorded.instances if each.generation not in gone}
        return frozenset(
            each
            for each in self._recorded.of_pods
            if each not in self._ended and (each in left or each in self._recorded.beside)
        )

    def end_leases_without_instances(self) -> None:
        named = {each.lease for each in self._recorded.instances}
        for lease in self._recorded.leases:
            if lease not in named:
                self._ended.setdefault(lease, INSTANCE_LOST)

    def compare_gpu(self, gpu: ObservedGpu) -> None:
        unmatched = {instance.gpu_instance_id: instance for instance in gpu.instances}
        self._why_gone = GPU_RESET if gpu.mode.current and not gpu.instances else INSTANCE_LOST
        records = [each for each in self._recorded.instances if each.gpu == gpu.uuid]
        # Records with a known id match first, so that what is left for the others is recorded nowhere.
        for each in sorted(records, key=lambda each: (each.gpu_instance_id is None, -each.generation)):
            if each.kind.shares_memory:
                self._compare_share(each, gpu)
                continue
            if not each.kind.is_listed:
                self._compare_unlisted(each, gpu)
                continue
            match = _match(each, unmatched)
            if match is not None:
                del unmatched[match.gpu_instance_id]
            self._compare(each, match)
        self._found += [AdoptForeign(gpu.uuid, instance) for instance in unmatched.values()]

    def _compare_unlisted(self, record: RecordedInstance, gpu: ObservedGpu) -> None:
        """Compare a device that the driver does not list, such as a whole GPU: lost if its MIG mode is wrong."""
        is_gone = gpu.mode.current is not record.kind.needs_mig_mode
        if record.state is InstanceState.FOREIGN:
            if is_gone:
                self._gone.append(ForgetForeign(record.generation))
        elif is_gone:
            self._end(record, INSTANCE_LOST)
            self._gone.append(ForgetInstance(record.generation, INSTANCE_LOST))
        else:
            self._settle(record)

    def _compare_share(self, record: RecordedInstance, gpu: ObservedGpu) -> None:
        """Compare a share, which is never set up again: its processes would go on without a limit meanwhile."""
        lost = {} if gpu.sharing is None else gpu.sharing.lost
        if gpu.mode.current:
            self._end(record, INSTANCE_LOST)
        elif record.generation in lost:
            self._end(record, LIMIT_LOST)
        elif record.lease is not None and _answered(record):
            return
        else:
            self._end(record, NEVER_MADE)
        if record.generation <= self._recorded.doubtful_up_to:
            # Somebody may have the share whom the ledger does not know.
            self._gone.append(ForgetInstance(record.generation, INSTANCE_LOST))
        else:
            self._kept.append(EndShare(record.generation, lost.get(record.generation, "")))

    def _compare(self, record: RecordedInstance, match: ObservedInstance | None) -> None:
        if match is None:
            self._missing(record)
        elif record.state is InstanceState.FOREIGN:
            self._update_ids(record, match)
        elif not match.compute_instances and record.generation <= self._recorded.doubtful_up_to:
            # Somebody may be creating this one now, or have made it so on purpose.
            self._end(record, INSTANCE_LOST)
            self._gone.append(ForgetInstance(record.generation, INSTANCE_LOST))
            self._found.append(AdoptForeign(record.gpu, match))
        elif not match.compute_instances:
            # It is of no use to anyone and holds its slices: remove what is left of it.
            self._end(record, INSTANCE_LOST if _answered(record) else NEVER_MADE)
            self._remove(record, match)
        elif record.state is InstanceState.CREATING and not _answered(record):
            self._end(record, NEVER_MADE)
            if match.processes:
                # No caller was given this instance, so somebody else made it and uses it.
                self._gone.append(ForgetInstance(record.generation, NEVER_MADE))
                self._found.append(AdoptForeign(record.gpu, match))
            else:
                self._remove(record, match)
        else:
            self._update_ids(record, match)
            self._settle(record)

    def _missing(self, record: RecordedInstance) -> None:
        if record.state is InstanceState.FOREIGN:
            self._gone.append(ForgetForeign(record.generation))
            return
        reason = self._why_gone
        if record.state is InstanceState.DESTROYING:
            reason = DESTROYED
        elif record.state is InstanceState.CREATING and not _answered(record):
            reason = NEVER_MADE
        self._end(record, reason)
        self._gone.append(ForgetInstance(record.generation, reason))

    def _settle(self, record: RecordedInstance) -> None:
        """Bring the recorded state of an instance that exists and is complete to a final one."""
        if record.lease is not None and record.state in {InstanceState.CREATING, InstanceState.LEASED}:
            if not _answered(record):
                self._end(record, NEVER_MADE)  # which leaves the instance idle
            elif record.state is InstanceState.CREATING:
                self._kept.append(MarkLeased(record.generation, record.lease))
        elif record.state not in {InstanceState.IDLE, InstanceState.BLOCKED}:
            # Also one being destroyed: the plan that needed its slices ended with the agent.
            self._kept.append(MarkIdle(record.generation))

    def _update_ids(self, record: RecordedInstance, match: ObservedInstance) -> None:
        compute = match.compute_instances[0] if match.compute_instances else None
        # A driver that lists no MIG devices for a moment does not clear a UUID.
        uuid = match.uuid if match.uuid or compute is None else record.uuid
        known = (record.gpu_instance_id, record.compute_instance_id, record.uuid)
        if known != (match.gpu_instance_id, compute, uuid):
            self._kept.append(UpdateIds(record.generation, match.gpu_instance_id, compute, uuid))

    def _remove(self, record: RecordedInstance, match: ObservedInstance) -> None:
        self._kept.append(
            FinishDestroy(record.gpu, match.gpu_instance_id, record.profile_id, record.placement, record.generation)
        )

    def _end(self, record: RecordedInstance, reason: str) -> None:
        """End or degrade the instance's lease. A lease that was never granted always ends."""
        if record.lease is None:
            return
        if reason == NEVER_MADE:
            self._ended.setdefault(record.lease, reason)
        else:
            self._lost.append(LoseDevice(record.lease, record.generation, reason))


def _answered(record: RecordedInstance) -> bool:
    return record.state is InstanceState.LEASED if record.answered is None else record.answered


def _match(record: RecordedInstance, unmatched: Mapping[int, ObservedInstance]) -> ObservedInstance | None:
    """Return the observed instance of this record: with its id if one is known, and its profile and placement."""
    if record.gpu_instance_id is not None:
        found = unmatched.get(record.gpu_instance_id)
        return found if found is not None and _same_slot(record, found) else None
    return next((each for each in unmatched.values() if _same_slot(record, each)), None)


def _same_slot(record: RecordedInstance, observed: ObservedInstance) -> bool:
    return (record.profile_id, record.placement) == (observed.profile_id, observed.placement)
