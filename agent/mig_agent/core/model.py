"""The words of this project as types: profile, placement, slot, instance, lease, GPU, and a node seen at one moment.

Everything here is frozen. Sizes of memory are MiB unless a name says bytes, positions are memory slices, and moments
are seconds since the epoch on the wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple, NewType

RequestId = NewType("RequestId", str)
CallerId = NewType("CallerId", str)
"""Whose request ids: `uid 1000`, `name slurm`."""
NO_REQUEST_ID: Final = RequestId("")
UNRECORDED_CALLER: Final = CallerId("")
"""Who asked for a lease that a version before this one has recorded."""


class RequestKey(NamedTuple):
    """One request: two callers may well use the same id."""

    asker: CallerId
    id: RequestId


GpuUuid = NewType("GpuUuid", str)
"""A GPU's UUID as the driver spells it, `GPU-...`."""
LeaseId = NewType("LeaseId", str)
Generation = NewType("Generation", int)
"""Our own number of an instance, given once and never again: the identity that a MIG UUID is not."""

WHOLE_GPU_PROFILE_ID = -1
"""The id of the profile that stands for a GPU without MIG mode, handed out whole; no driver uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Describes a kind of device that a lease can hold: what it takes of a GPU, and how it comes and goes.

    Planning, recovery and messages ask these properties; what touches a device is its kind's `DeviceBackend`.
    """

    name: str
    """In the ledger: `mig`, `whole`."""
    needs_mig_mode: bool
    """Whether a GPU must be in MIG mode to have such devices; any other kind needs a GPU that is not."""
    takes_whole_gpu: bool
    """Whether one device takes all of its GPU, and serves only who asks for a whole one; else it has a placement."""
    is_created: bool
    """Whether a device is created when it is wanted, and destroyed; else it exists while its GPU is in its mode."""
    is_listed: bool
    """Whether the driver lists the devices, by ids that it gave them."""


MIG_INSTANCE: Final = DeviceKind(
    name="mig", needs_mig_mode=True, takes_whole_gpu=False, is_created=True, is_listed=True
)
WHOLE_GPU: Final = DeviceKind(
    name="whole", needs_mig_mode=False, takes_whole_gpu=True, is_created=False, is_listed=False
)
DEVICE_KINDS: Final = MappingProxyType({kind.name: kind for kind in (MIG_INSTANCE, WHOLE_GPU)})
"""All of them, by name."""


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """A window on a GPU's memory-slice axis: `start` and `size` in memory slices."""

    start: int
    size: int

    @property
    def mask(self) -> int:
        """The window as a bit mask, bit n for slice n."""
        return ((1 << self.size) - 1) << self.start

    def __str__(self) -> str:
        """As people write it: `0-3`, or `4` for a single slice."""
        last = self.start + self.size - 1
        return str(self.start) if self.size == 1 else f"{self.start}-{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """What an instance takes of a GPU beside memory: counts, summed over all instances against the GPU's totals."""

    multiprocessors: int = 0
    copy: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0

    def as_tuple(self) -> tuple[int, int, int, int, int, int]:
        """In the order of the fields."""
        return (self.multiprocessors, self.copy, self.decoders, self.encoders, self.jpeg, self.ofa)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A size of device that a GPU model offers: a profile of MIG, or the whole GPU."""

    id: int
    """The driver's profile id (`nvmlGpuInstanceProfileInfo.id`), not its enum."""
    name: str
    """As the driver spells it: `1g.10gb`, `1g.5gb+me`; `whole` for a GPU without MIG mode."""
    compute_slices: int
    memory_slices: int
    memory_mib: int
    """What the driver reports, not what the name says."""
    placements: tuple[Placement, ...]
    engines: Engines = field(default_factory=Engines)
    attributes: frozenset[str] = frozenset()
    """What follows the name's `+` or `-`, sign included: {`+me`}, {`+gfx`}, {`+me.all`}, {`-me`}."""
    kind: DeviceKind = MIG_INSTANCE

    @property
    def memory_bytes(self) -> int:
        """`memory_mib` in bytes."""
        return self.memory_mib << 20


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What one GPU can be cut into. GPUs of one model share one Layout, so tables are computed once for it."""

    model: str
    """The product name as the driver gives it, `NVIDIA H100 80GB HBM3`."""
    memory_slices: int
    memory_mib: int
    """The whole GPU's memory."""
    profiles: tuple[Profile, ...]
    engines: Engines = field(default_factory=Engines)
    """The GPU's totals."""

    @cached_property
    def can_create(self) -> bool:
        """Whether devices are created on such a GPU; else what it has exists always."""
        return any(profile.kind.is_created for profile in self.profiles)

    @cached_property
    def by_id(self) -> Mapping[int, Profile]:
        """The profiles by the driver's id."""
        return MappingProxyType({profile.id: profile for profile in self.profiles})

    @cached_property
    def by_name(self) -> Mapping[str, Profile]:
        """The profiles by name."""
        return MappingProxyType({profile.name: profile for profile in self.profiles})

    def __hash__(self) -> int:
        """By model and profiles; computed once, since the planner keeps its tables by Layout."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.memory_slices, self.memory_mib, self.profiles, self.engines))


def whole_gpu_layout(model: str, memory_mib: int) -> Layout:
    """The layout of a GPU that is handed out whole: one slice, one profile, one placement."""
    whole = Profile(
        id=WHOLE_GPU_PROFILE_ID,
        name="whole",
        compute_slices=1,
        memory_slices=1,
        memory_mib=memory_mib,
        placements=(Placement(0, 1),),
        kind=WHOLE_GPU,
    )
    return Layout(model=model, memory_slices=1, memory_mib=memory_mib, profiles=(whole,))


@dataclass(frozen=True, slots=True)
class Slot:
    """An instance that may exist: GPU, profile and placement."""

    gpu: GpuUuid
    profile: Profile
    placement: Placement

    def __str__(self) -> str:
        """As messages name it, without the GPU: `1g.10gb on slices 0-1`."""
        if self.profile.kind.takes_whole_gpu:
            return "whole GPU"
        plural = "s" if self.placement.size > 1 else ""
        return f"{self.profile.name} on slice{plural} {self.placement}"


class InstanceState(StrEnum):
    """What an instance is doing, as seen by everybody."""

    LEASED = "leased"
    IDLE = "idle"
    FOREIGN = "foreign"
    """Made by someone else; never destroyed."""
    BLOCKED = "blocked"
    """Ours and unleased, but in use, or the driver will not let it go."""
    CREATING = "creating"
    DESTROYING = "destroying"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A slot that exists, or is on its way in or out. A whole GPU without MIG mode is one too."""

    slot: Slot
    generation: Generation
    state: InstanceState
    gpu_instance_id: int | None = None
    """None while it is being created, and for a whole GPU."""
    compute_instance_id: int | None = None
    uuid: str = ""
    """`MIG-...`; the GPU's own UUID for a whole GPU; empty while it is being created."""
    lease: LeaseId | None = None
    since: float = 0.0
    """When the state began."""
    reason: str = ""
    """Why it is blocked, and which process holds it."""
    last_tenant: str | None = ""
    """Whose lease it is or was last in; None: nobody has had it since it was created, "": that is not known."""

    @property
    def kind(self) -> DeviceKind:
        """The kind of device that it is."""
        return self.slot.profile.kind

    @property
    def is_complete(self) -> bool:
        """Whether it has all ids that the driver gives devices of its kind; else it is half made."""
        return not self.kind.is_listed or self.compute_instance_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of Kubernetes that holds a lease. A pod of the same name with another UID is another pod."""

    namespace: str
    name: str
    uid: str = ""
    """Empty where it is not known."""

    def may_be(self, other: Pod) -> bool:
        """Whether both are the same pod, as far as is known: one of two without a UID may be the other."""
        same_name = (self.namespace, self.name) == (other.namespace, other.name)
        return same_name and (not self.uid or not other.uid or self.uid == other.uid)

    def __str__(self) -> str:
        """For messages, and the name of its holder: `pod team-a/train-7f2c`."""
        return f"pod {self.namespace}/{self.name}"

    def facts(self) -> dict[str, str]:
        """For the data of events: `pod_namespace`, `pod_name`, `pod_uid`."""
        return {"pod_namespace": self.namespace, "pod_name": self.name, "pod_uid": self.uid}


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletDevice:
    """One device as the kubelet counts it: an abstract id under the name of an extended resource."""

    resource: str
    """`nvidia.com/mig-1g.10gb`."""
    id: str
    """`mig-agent-3`."""

    def __str__(self) -> str:
        """For messages: `nvidia.com/mig-1g.10gb mig-agent-3`."""
        return f"{self.resource} {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease or asks for one."""

    tenant: str = ""
    name: str = ""
    """As people should see it in messages: `alice`, `pod team-a/train-7f2c`."""
    uid: int | None = None
    pid: int | None = None
    pod: Pod | None = None
    """The pod whose lease it is, or is to be. Once the pod is there the lease ends with it, and by nobody else."""

    def __str__(self) -> str:
        """For messages."""
        return self.name or (str(self.pod) if self.pod is not None else self.tenant) or "somebody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A holder's right to one or more instances, in the order that the request named its devices."""

    id: LeaseId
    request_id: RequestId
    holder: Holder
    instances: tuple[Generation, ...]
    created_at: float
    expires_at: float | None = None
    """None: no deadline."""
    pid: int | None = None
    """The process whose end ends the lease."""
    hold: bool = False
    """Lives as long as a Hold stream."""
    reused: tuple[bool, ...] = ()
    """For each device, whether an idle instance was reused for it."""
    kubelet_devices: tuple[KubeletDevice, ...] = ()
    """For each device of a pod's lease, the kubelet's device that it stands for, in the order of `instances`."""
    arrived: bool = False
    """The pod that it was taken for has been seen on this node; it has no deadline any more."""
    asker: CallerId = UNRECORDED_CALLER

    @property
    def request_key(self) -> RequestKey:
        """The request that led to it."""
        return RequestKey(self.asker, self.request_id)

    @property
    def of_pod(self) -> bool:
        """Whether a pod of this node has it: it ends with the pod, and by nobody else."""
        return self.holder.pod is not None and (self.arrived or bool(self.kubelet_devices))

    @property
    def promised(self) -> bool:
        """Whether it was taken for a pod that has not come yet: until then it is its holder's, by its token."""
        return self.holder.pod is not None and not self.of_pod


class GpuState(StrEnum):
    """What the agent does with a GPU."""

    READY = "ready"
    """In MIG mode, partitioned on request."""
    WHOLE = "whole"
    """Without MIG mode, handed out whole; `Gpu.reason` says why."""
    CORDONED = "cordoned"
    """Nothing new is placed on it; `Gpu.reason` says why and by whom."""
    LOST = "lost"
    """The driver no longer answers for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigMode:
    """MIG mode now and after the next reset, as the driver tells it."""

    capable: bool
    current: bool = False
    pending: bool = False


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU in a NodeView. `instances` are sorted by start of their placement."""

    index: int
    uuid: GpuUuid
    layout: Layout
    mode: MigMode
    state: GpuState
    reason: str = ""
    set_aside: bool = False
    """Cordoned by the agent itself, which uses it again by itself when its driver answers."""
    minor: int | None = None
    instances: tuple[Instance, ...] = ()

    @cached_property
    def held_mask(self) -> int:
        """The slices that nothing may be placed on: of every instance but the idle ones."""
        mask = 0
        for instance in self.instances:
            if instance.state is not InstanceState.IDLE:
                mask |= instance.slot.placement.mask
        return mask

    @cached_property
    def idle(self) -> tuple[Instance, ...]:
        """The idle instances."""
        return tuple(instance for instance in self.instances if instance.state is InstanceState.IDLE)

    @cached_property
    def scratch(self) -> dict[str, object]:
        """Where pure functions keep what they computed of this GPU as it is; no part of its value."""
        return {}


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """All of a node at one revision. GPUs are sorted by index."""

    node: str
    revision: int
    gpus: tuple[Gpu, ...]
    leases: Mapping[LeaseId, Lease] = field(default_factory=dict)

    @cached_property
    def by_uuid(self) -> Mapping[GpuUuid, Gpu]:
        """The GPUs by UUID."""
        return MappingProxyType({gpu.uuid: gpu for gpu in self.gpus})

    @cached_property
    def instances(self) -> Mapping[Generation, Instance]:
        """All instances by generation."""
        return MappingProxyType({i.generation: i for gpu in self.gpus for i in gpu.instances})


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One device that a request asks for: exactly one of memory, profile, fraction and whole GPU."""

    memory_bytes: int | None = None
    profile: str | None = None
    fraction: float | None = None
    """0 < fraction <= 1 of a GPU's memory slices."""
    whole_gpu: bool = False
    min_compute_slices: int = 1
    attributes: frozenset[str] = frozenset()
    """Which attribute profiles may serve: {`+me`}; empty asks for plain ones only."""
    text: str = ""
    """As the person wrote it (`4G`, `2g.10gb`), for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What somebody asks for: one or more devices, all or nothing."""

    wants: tuple[Want, ...]
    request_id: RequestId = NO_REQUEST_ID
    holder: Holder = field(default_factory=Holder)
    gpus: tuple[str, ...] = ()
    """Only these GPUs, each by index (`"1"`) or UUID; empty: any."""
    priority: int = 0
    """Higher goes first in the queue."""
    wait_seconds: float | None = None
    """How long to queue; None: be refused at once; infinity: as long as the client stays."""
    ttl_seconds: float | None = None
    pid: int | None = None
    if_revision: int | None = None
    """Refuse when the node has changed since this revision."""
    kubelet_devices: tuple[KubeletDevice, ...] = ()
    """For each want of a pod, the kubelet's device that it stands for; empty where no kubelet asks."""
    asker: CallerId = UNRECORDED_CALLER
    """Who calls, as the transport knows it."""

    @property
    def key(self) -> RequestKey:
        """Which request it is."""
        return RequestKey(self.asker, self.request_id)


def live_devices(view: NodeView, lease: Lease) -> tuple[Instance | None, ...]:
    """Of each device of a lease its instance; None for one that is lost: gone, or on a GPU that is lost.

    None, too, where the GPU does not answer yet or is not managed now.
    """
    return tuple(
        each if each is not None and each.lease == lease.id and _is_on_working_gpu(view, each) else None
        for each in (view.instances.get(generation) for generation in lease.instances)
    )


def _is_on_working_gpu(view: NodeView, instance: Instance) -> bool:
    return view.by_uuid[instance.slot.gpu].state is not GpuState.LOST
