"""What to do when the ledger and the hardware disagree: a pure comparison that returns repairs as values.

The hardware is the truth about instances, the ledger about leases. Called at start, after an error, on the driver's
event and on a slow timer; carrying the repairs out and comparing again gives none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mig_agent.core.model import DeviceKind, Generation, GpuUuid, InstanceState, LeaseId, Placement
from mig_agent.core.observation import ObservedGpu, ObservedInstance

REBOOT = "reboot"
"""The machine was started anew: no instance outlives that."""
INSTANCE_LOST = "instance-lost"
"""Gone, or replaced, or taken apart by somebody else."""
GPU_RESET = "gpu-reset"
"""Nothing of what was on its GPU is there any more: a reset, or somebody destroyed all of it; no call tells which."""
NEVER_MADE = "never-made"
"""The agent stopped while it was being made; nobody was told of it."""
DESTROYED = "destroyed"
"""The agent stopped while it was being destroyed, and it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedInstance:
    """An instance as the ledger knows it."""

    generation: Generation
    gpu: GpuUuid
    kind: DeviceKind
    profile_id: int
    placement: Placement
    state: InstanceState
    gpu_instance_id: int | None = None
    """None until the driver gave one; always None for a kind that it does not list."""
    compute_instance_id: int | None = None
    uuid: str = ""
    lease: LeaseId | None = None
    """Also while it is being created for that lease."""
    answered: bool | None = None
    """Whether the lease was committed as granted, so that its holder may know of it. None: as the state says, which is
    no for `creating` and yes for `leased`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The ledger at one moment."""

    boot_id: str
    """Of the boot in which it was written; empty for a new ledger."""
    instances: tuple[RecordedInstance, ...] = ()
    leases: tuple[LeaseId, ...] = ()
    """All leases that have not ended."""
    of_pods: frozenset[LeaseId] = frozenset()
    """Those of pods. A container keeps its device nodes whatever else is lost, so such a lease goes on with what is
    left of it; any other is all or nothing."""
    beside: frozenset[LeaseId] = frozenset()
    """Leases that have instances beside those that are listed here."""
    doubtful_up_to: int = 0
    """Instances up to this generation may be another's by now: none of them is ever destroyed. 0: the ledger accounts
    for everything."""


@dataclass(frozen=True, slots=True)
class EndLease:
    """The lease cannot be kept. As with every end of a lease, those of its instances that are left become idle."""

    lease: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class LoseDevice:
    """An instance of a pod's lease is lost, and the lease goes on with the others until the pod ends."""

    lease: LeaseId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetInstance:
    """An instance of ours is gone, or never was."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class AdoptForeign:
    """Found on the hardware and unknown: recorded as somebody else's."""

    gpu: GpuUuid
    observed: ObservedInstance


@dataclass(frozen=True, slots=True)
class ForgetForeign:
    """An instance that somebody else had made is gone."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class FinishDestroy:
    """A half-made or half-destroyed instance of ours stands on the hardware: remove what is left, then forget it."""

    gpu: GpuUuid
    gpu_instance_id: int
    profile_id: int
    placement: Placement
    generation: Generation


@dataclass(frozen=True, slots=True)
class MarkIdle:
    """Ours, complete, and without a lease: idle, whatever it was doing when the record was written."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class MarkLeased:
    """Ours, complete, and its lease was answered: leased."""

    generation: Generation
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class UpdateIds:
    """The ledger lacks the driver's ids of an instance of ours, or its device's UUID changed."""

    generation: Generation
    gpu_instance_id: int
    compute_instance_id: int | None
    uuid: str


Repair = (
    EndLease
    | LoseDevice
    | ForgetInstance
    | AdoptForeign
    | ForgetForeign
    | FinishDestroy
    | MarkIdle
    | MarkLeased
    | UpdateIds
)


def reconcile(recorded: Recorded, observed: Sequence[ObservedGpu], boot_id: str) -> tuple[Repair, ...]:
    """The repairs that make the ledger agree with the hardware; empty when it does.

    A GPU that is not among the observed cannot be judged: its records stay as they are. Leases end first, then what is
    gone is forgotten, then what was found is recorded.
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
        *(EndLease(lease, REBOOT) for lease in leases),
        *(
            ForgetForeign(each.generation)
            if each.state is InstanceState.FOREIGN
            else ForgetInstance(each.generation, REBOOT)
            for each in recorded.instances
        ),
        # Ours are gone, so whatever is there somebody else has made since.
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
            *(EndLease(lease, reason) for lease, reason in ended.items()),
            *(each for each in self._lost if each.lease in going_on),
            *self._gone,
            *self._kept,
            *self._found,
        )

    def _going_on(self) -> frozenset[LeaseId]:
        """The leases of pods of which something is left."""
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
        # Those whose id is known choose first, so that what is left for the others is known to nobody.
        for each in sorted(records, key=lambda each: (each.gpu_instance_id is None, -each.generation)):
            if not each.kind.is_listed:
                self._compare_unlisted(each, gpu)
                continue
            match = _match(each, unmatched)
            if match is not None:
                del unmatched[match.gpu_instance_id]
            self._compare(each, match)
        self._found += [AdoptForeign(gpu.uuid, instance) for instance in unmatched.values()]

    def _compare_unlisted(self, record: RecordedInstance, gpu: ObservedGpu) -> None:
        """What the driver does not list, such as a GPU leased whole, is gone once its GPU is in the other mode."""
        is_gone = gpu.mode.current is not record.kind.needs_mig_mode
        if record.state is InstanceState.FOREIGN:
            if is_gone:
                self._gone.append(ForgetForeign(record.generation))
        elif is_gone:
            self._end(record, INSTANCE_LOST)
            self._gone.append(ForgetInstance(record.generation, INSTANCE_LOST))
        else:
            self._settle(record)

    def _compare(self, record: RecordedInstance, match: ObservedInstance | None) -> None:
        if match is None:
            self._missing(record)
        elif record.state is InstanceState.FOREIGN:
            self._update_ids(record, match)
        elif not match.compute_instances and record.generation <= self._recorded.doubtful_up_to:
            # Somebody may be making it anew, or have made it so.
            self._end(record, INSTANCE_LOST)
            self._gone.append(ForgetInstance(record.generation, INSTANCE_LOST))
            self._found.append(AdoptForeign(record.gpu, match))
        elif not match.compute_instances:
            # Nobody can use it, and its slices are held: what is left of it goes.
            self._end(record, INSTANCE_LOST if _answered(record) else NEVER_MADE)
            self._remove(record, match)
        elif record.state is InstanceState.CREATING and not _answered(record):
            self._end(record, NEVER_MADE)
            if match.processes:
                # Nobody was told of ours, so somebody else made this one and uses it.
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
        """Brings the state of an instance that is there, and complete, to rest."""
        if record.lease is not None and record.state in {InstanceState.CREATING, InstanceState.LEASED}:
            if not _answered(record):
                self._end(record, NEVER_MADE)  # which leaves the instance idle
            elif record.state is InstanceState.CREATING:
                self._kept.append(MarkLeased(record.generation, record.lease))
        elif record.state not in {InstanceState.IDLE, InstanceState.BLOCKED}:
            # Being destroyed, too: the plan that needed its slices died with the agent.
            self._kept.append(MarkIdle(record.generation))

    def _update_ids(self, record: RecordedInstance, match: ObservedInstance) -> None:
        compute = match.compute_instances[0] if match.compute_instances else None
        # A driver that lists no MIG devices for a moment takes no name away.
        uuid = match.uuid if match.uuid or compute is None else record.uuid
        known = (record.gpu_instance_id, record.compute_instance_id, record.uuid)
        if known != (match.gpu_instance_id, compute, uuid):
            self._kept.append(UpdateIds(record.generation, match.gpu_instance_id, compute, uuid))

    def _remove(self, record: RecordedInstance, match: ObservedInstance) -> None:
        self._kept.append(
            FinishDestroy(record.gpu, match.gpu_instance_id, record.profile_id, record.placement, record.generation)
        )

    def _end(self, record: RecordedInstance, reason: str) -> None:
        """The lease cannot be kept as it is; one that nobody was told of cannot be kept at all."""
        if record.lease is None:
            return
        if reason == NEVER_MADE:
            self._ended.setdefault(record.lease, reason)
        else:
            self._lost.append(LoseDevice(record.lease, record.generation, reason))


def _answered(record: RecordedInstance) -> bool:
    return record.state is InstanceState.LEASED if record.answered is None else record.answered


def _match(record: RecordedInstance, unmatched: Mapping[int, ObservedInstance]) -> ObservedInstance | None:
    """The observed instance that is this one: same id where one is known, and same profile and placement."""
    if record.gpu_instance_id is not None:
        found = unmatched.get(record.gpu_instance_id)
        return found if found is not None and _same_slot(record, found) else None
    return next((each for each in unmatched.values() if _same_slot(record, each)), None)


def _same_slot(record: RecordedInstance, observed: ObservedInstance) -> bool:
    return (record.profile_id, record.placement) == (observed.profile_id, observed.placement)
