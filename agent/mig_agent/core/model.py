"""The types of the core: profile, placement, slot, instance, lease, GPU, and a node at one moment.

Everything here is frozen. Sizes of memory are MiB unless a name says bytes, positions are memory slices, and moments
are seconds since the epoch on the wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple, NewType

from mig_agent.core.owner import TOKEN_OWNER, Owner
from mig_agent.core.quantities import format_mib
from mig_agent.core.shares import Enforcement, ShareTerms
from mig_agent.core.strenum import StrEnum

RequestId = NewType("RequestId", str)
CallerId = NewType("CallerId", str)
"""The caller that request ids belong to: `uid 1000`, `name slurm`."""
NO_REQUEST_ID: Final = RequestId("")
UNRECORDED_CALLER: Final = CallerId("")
"""The caller of a request that has not reached the engine yet, which alone knows its caller."""


class RequestKey(NamedTuple):
    """Identifies a request: two callers may use the same id."""

    caller_id: CallerId
    id: RequestId


GpuUuid = NewType("GpuUuid", str)
"""A GPU's UUID as the driver spells it, `GPU-...`."""
LeaseId = NewType("LeaseId", str)
Generation = NewType("Generation", int)
"""The agent's own number of an instance, used once: an identity, which a MIG UUID is not, since it recurs."""

WHOLE_GPU_PROFILE_ID = -1
"""The id of the profile of a GPU without MIG mode, leased whole; no driver uses it."""
SHARE_PROFILE_ID = -2
"""The id of the profiles of shares, whatever their memory; no driver uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device that a lease can hold: what it takes of a GPU, and how it is created.

    Planning, recovery and messages ask these properties; what touches a device is its kind's `DeviceBackend`.
    """

    name: str
    """The name in the ledger: `mig`, `whole`, `share`."""
    needs_mig_mode: bool
    """Whether the GPU must be in MIG mode; if not, it must not be."""
    takes_whole_gpu: bool
    """Whether one device takes all of its GPU, and serves only requests for a whole one; if not, it has a placement."""
    is_created: bool
    """Whether devices are created on request, and destroyed; if not, one exists while its GPU is in the right mode."""
    is_listed: bool
    """Whether the driver lists the devices, by ids that it gave them."""
    shares_memory: bool
    """True if devices divide their GPU's memory by MiB, side by side; if not, each takes slices of its own."""
    is_reusable: bool
    """True if a device stays for the next lease; if not, it is destroyed when its lease ends."""


MIG_INSTANCE: Final = DeviceKind(
    name="mig",
    needs_mig_mode=True,
    takes_whole_gpu=False,
    is_created=True,
    is_listed=True,
    shares_memory=False,
    is_reusable=True,
)
WHOLE_GPU: Final = DeviceKind(
    name="whole",
    needs_mig_mode=False,
    takes_whole_gpu=True,
    is_created=False,
    is_listed=False,
    shares_memory=False,
    is_reusable=True,
)
SHARE: Final = DeviceKind(
    name="share",
    needs_mig_mode=False,
    takes_whole_gpu=False,
    is_created=True,
    is_listed=False,
    shares_memory=True,
    is_reusable=False,
)
DEVICE_KINDS: Final = MappingProxyType({kind.name: kind for kind in (MIG_INSTANCE, WHOLE_GPU, SHARE)})
"""All kinds of devices, by name."""


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
        """Return the slices as people write them: `0-3`, or `4` for a single slice."""
        last = self.start + self.size - 1
        return str(self.start) if self.size == 1 else f"{self.start}-{last}"


def slices_in(mask: int) -> tuple[int, ...]:
    """Return the numbers of the slices in a bit mask, rising."""
    return tuple(number for number in range(mask.bit_length()) if mask >> number & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of an instance or a GPU: counts, summed over all instances against the GPU's totals."""

    multiprocessors: int = 0
    copy: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0

    def as_tuple(self) -> tuple[int, int, int, int, int, int]:
        """Return the counts in the order of the fields."""
        return (self.multiprocessors, self.copy, self.decoders, self.encoders, self.jpeg, self.ofa)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A size of device that a GPU model offers: a profile of MIG, or the whole GPU."""

    id: int
    """The driver's profile id (`nvmlGpuInstanceProfileInfo.id`), not its enum."""
    name: str
    """The name as the driver spells it: `1g.10gb`, `1g.5gb+me`; `whole` for a GPU without MIG mode."""
    compute_slices: int
    memory_slices: int
    memory_mib: int
    """The memory that the driver reports, which differs from the one in the name."""
    placements: tuple[Placement, ...]
    engines: Engines = field(default_factory=Engines)
    attributes: frozenset[str] = frozenset()
    """The parts of the name from a `+` or `-` on, sign included: {`+me`}, {`+gfx`}, {`+me.all`}, {`-me`}."""
    kind: DeviceKind = MIG_INSTANCE
    compute_percent: int | None = None
    """The most of the GPU's multiprocessors that each process of a share uses; None: all."""

    @property
    def memory_bytes(self) -> int:
        """`memory_mib` in bytes."""
        return self.memory_mib << 20


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What one GPU can be cut into. GPUs of one model share one Layout, so tables are computed once for it."""

    model: str
    """The product name as the driver reports it, `NVIDIA H100 80GB HBM3`."""
    memory_slices: int
    memory_mib: int
    """The whole GPU's memory."""
    profiles: tuple[Profile, ...]
    engines: Engines = field(default_factory=Engines)
    """The GPU's totals."""
    shares: ShareTerms | None = None
    """Terms on which a GPU without MIG mode is shared; None: it is not shared."""

    @cached_property
    def can_create(self) -> bool:
        """True if devices are created on such a GPU; False if its one device always exists."""
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
        """Return the hash of all fields; computed once, since the planner keeps its tables by Layout."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.memory_slices, self.memory_mib, self.profiles, self.engines, self.shares))


def whole_gpu_layout(model: str, memory_mib: int, shares: ShareTerms | None = None) -> Layout:
    """Return the layout of a GPU that is leased whole or shared: one slice, one profile, one placement."""
    whole = Profile(
        id=WHOLE_GPU_PROFILE_ID,
        name="whole",
        compute_slices=1,
        memory_slices=1,
        memory_mib=memory_mib,
        placements=(Placement(0, 1),),
        kind=WHOLE_GPU,
    )
    return Layout(model=model, memory_slices=1, memory_mib=memory_mib, profiles=(whole,), shares=shares)


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of an instance that exists or could exist: GPU, profile and placement."""

    gpu: GpuUuid
    profile: Profile
    placement: Placement

    def __str__(self) -> str:
        """Return the slot as messages name it, without the GPU: `1g.10gb on slices 0-1`."""
        if self.profile.kind.takes_whole_gpu:
            return "whole GPU"
        if self.profile.kind.shares_memory:
            return f"share of {format_mib(self.profile.memory_mib)}"
        plural = "s" if self.placement.size > 1 else ""
        return f"{self.profile.name} on slice{plural} {self.placement}"


class InstanceState(StrEnum):
    """The states of an instance, as every client sees them."""

    LEASED = "leased"
    IDLE = "idle"
    FOREIGN = "foreign"
    """Made by another program; never destroyed by the agent."""
    BLOCKED = "blocked"
    """The agent's own and not leased, but in use, or the driver refuses to destroy it."""
    CREATING = "creating"
    DESTROYING = "destroying"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance that exists, or is being created or destroyed. A whole GPU without MIG mode is one too."""

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
    """When the state began, in seconds since the epoch."""
    reason: str = ""
    """Why it is blocked, and which process holds it."""
    last_tenant: str | None = ""
    """The tenant of its current or last lease; None: never leased since it was created, "": unknown."""
    enforced_by: Enforcement | None = None
    """The way in which the memory limit of a share is enforced; None for other kinds of devices."""

    @property
    def kind(self) -> DeviceKind:
        """The kind of the device."""
        return self.slot.profile.kind

    @property
    def is_available(self) -> bool:
        """True if it is idle and of a kind that stays for the next lease."""
        return self.state is InstanceState.IDLE and self.kind.is_reusable

    @property
    def is_complete(self) -> bool:
        """True if it has all ids that the driver gives devices of its kind; False while it is being created."""
        return not self.kind.is_listed or self.compute_instance_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The person, program or pod that holds a lease or requests one."""

    tenant: str = ""
    name: str = ""
    """The name that people see in messages: `alice`, `pod team-a/train-7f2c`."""
    uid: int | None = None
    pid: int | None = None
    """The process that made the request."""

    def __str__(self) -> str:
        """Return the name that messages show; `somebody` if nothing is known."""
        return self.name or self.tenant or "somebody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A holder's right to one or more instances, in the order in which the request named its devices."""

    id: LeaseId
    request_id: RequestId
    holder: Holder
    instances: tuple[Generation, ...]
    created_at: float
    expires_at: float | None = None
    """None: no deadline."""
    owner: Owner = TOKEN_OWNER
    """Decides what ends the lease beside its deadline."""
    reused: tuple[bool, ...] = ()
    """For each device, True if an idle instance was reused for it."""
    caller_id: CallerId = UNRECORDED_CALLER

    @property
    def request_key(self) -> RequestKey:
        """The key of the request that created the lease."""
        return RequestKey(self.caller_id, self.request_id)


class GpuState(StrEnum):
    """The ways in which the agent uses a GPU."""

    READY = "ready"
    """In MIG mode, partitioned on request."""
    WHOLE = "whole"
    """Without MIG mode, leased whole; `Gpu.reason` says why."""
    CORDONED = "cordoned"
    """Nothing new is placed on it; `Gpu.reason` says why and by whom."""
    LOST = "lost"
    """The driver no longer answers for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigMode:
    """MIG mode now and after the next reset, as the driver reports it."""

    capable: bool
    current: bool = False
    pending: bool = False


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU in a NodeView. `instances` are sorted by the start of their placement."""

    index: int
    uuid: GpuUuid
    layout: Layout
    mode: MigMode
    state: GpuState
    reason: str = ""
    set_aside: bool = False
    """True if the agent itself cordoned the GPU; it uses it again once its driver answers."""
    minor: int | None = None
    draining: bool = False
    """True if it is cordoned to become empty."""
    drain_until: float | None = None
    """Time at which what is leased there ends at the latest, in seconds since the epoch; None: by itself."""
    not_shared: str = ""
    """Why a GPU without MIG mode is not shared, as a phrase with its hint; empty if it is, or is not meant to be."""
    instances: tuple[Instance, ...] = ()

    @cached_property
    def held_mask(self) -> int:
        """The slices on which nothing may be placed: those of every instance except the idle ones."""
        mask = 0
        for instance in self.instances:
            if not instance.is_available:
                mask |= instance.slot.placement.mask
        return mask

    @cached_property
    def idle(self) -> tuple[Instance, ...]:
        """The idle instances that are reused, or destroyed when their slices are needed."""
        return tuple(instance for instance in self.instances if instance.is_available)

    @cached_property
    def scratch(self) -> dict[str, object]:
        """A cache of pure functions for this state of the GPU; not part of its value."""
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


class Isolation(StrEnum):
    """The isolation that a want asks for. The values are on the wire and in the settings."""

    ANY = "any"
    """MIG where the node has it, otherwise a share."""
    MIG = "mig"
    """A MIG instance, or a whole GPU where that is asked for; never a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One device of a request: exactly one of memory, profile, fraction, whole GPU and slot."""

    memory_bytes: int | None = None
    profile: str | None = None
    fraction: float | None = None
    """0 < fraction <= 1 of a GPU's memory slices."""
    whole_gpu: bool = False
    slot: Slot | None = None
    """Exactly this placement of a profile on one GPU."""
    min_compute_slices: int = 1
    attributes: frozenset[str] = frozenset()
    """The attributes that the profile must have: {`+me`}; empty: plain profiles only."""
    isolation: Isolation | None = None
    """Decides whether a share may serve a want for memory or a fraction; None: as the administrator has set."""
    compute_percent: int | None = None
    """The most of a GPU's multiprocessors that each process uses; only a share by MPS serves it. None: all."""
    has_process: bool = True
    """True if a process is handed over that will use the device; a share may need one."""
    text: str = ""
    """The text that the person wrote (`4G`, `2g.10gb`), for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One or more devices that a caller requests, all or nothing."""

    wants: tuple[Want, ...]
    request_id: RequestId = NO_REQUEST_ID
    holder: Holder = field(default_factory=Holder)
    gpus: tuple[str, ...] = ()
    """Only these GPUs, each by index (`"1"`) or UUID; empty: any."""
    priority: int = 0
    """Higher goes first in the queue."""
    wait_seconds: float | None = None
    """How long to queue; None: refuse at once; infinity: as long as the client stays connected."""
    ttl_seconds: float | None = None
    owner: Owner = TOKEN_OWNER
    """What the lease will last as long as."""
    if_revision: int | None = None
    """Refuse if the node has changed since this revision."""
    caller_id: CallerId = UNRECORDED_CALLER
    """The caller, as the transport identified it."""

    @property
    def key(self) -> RequestKey:
        """The key of the request."""
        return RequestKey(self.caller_id, self.request_id)


def live_devices(view: NodeView, lease: Lease) -> tuple[Instance | None, ...]:
    """Return the instance of each device of a lease; None for a lost one: removed, or on a lost GPU.

    Also None where the GPU has not answered yet or is not managed now.
    """
    return tuple(
        each if each is not None and each.lease == lease.id and _is_on_working_gpu(view, each) else None
        for each in (view.instances.get(generation) for generation in lease.instances)
    )


def _is_on_working_gpu(view: NodeView, instance: Instance) -> bool:
    return view.by_uuid[instance.slot.gpu].state is not GpuState.LOST
