"""Nodes for tests of pure code, told in a few words, and hypothesis strategies for any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from hypothesis import strategies as st

from mig_agent.adapters.catalog_files import load
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Holder,
    Instance,
    InstanceState,
    Layout,
    Lease,
    LeaseId,
    MigMode,
    NodeView,
    Placement,
    Request,
    RequestId,
    Slot,
    Want,
    whole_gpu_layout,
)
from mig_agent.core.quantities import parse_memory

CATALOG = load()
LAYOUTS = tuple(entry.layout for entry in CATALOG.entries)


@cache
def layout_of(model: str) -> Layout:
    """The layout whose product name contains this."""
    return next(each for each in LAYOUTS if model in each.model)


A30 = layout_of("A30")
A100_40 = layout_of("A100-SXM4-40GB")
A100_80 = layout_of("A100-SXM4-80GB")
H100 = layout_of("H100 80GB")
RTX_PRO = layout_of("RTX PRO 6000")


@dataclass(frozen=True, slots=True)
class Has:
    """An instance on a GPU: `Has("3g.40gb", 4, "leased", "alice")`."""

    profile: str
    start: int = 0
    state: str = "idle"
    holder: str = ""
    since: float = 0.0
    expires_at: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU of a node: its layout and what is on it."""

    layout: Layout
    has: Sequence[Has] = ()
    state: GpuState = GpuState.READY
    reason: str = ""
    capable: bool = True


def whole(state: str = "idle", holder: str = "", *, capable: bool = True, memory_mib: int = 23028) -> Machine:
    """A GPU without MIG mode."""
    return Machine(
        whole_gpu_layout("NVIDIA A10", memory_mib),
        (Has("whole", 0, state, holder),),
        GpuState.WHOLE,
        "MIG mode is off" if capable else "it cannot do MIG",
        capable,
    )


@dataclass
class _Builder:
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    generation: int = 0

    def gpu(self, index: int, machine: Machine) -> Gpu:
        uuid = GpuUuid(f"GPU-{index:08x}")
        instances = [self.instance(uuid, machine.layout, has) for has in machine.has]
        on = machine.layout.can_create
        return Gpu(
            index=index,
            uuid=uuid,
            layout=machine.layout,
            mode=MigMode(capable=machine.capable, current=on, pending=on),
            state=machine.state,
            reason=machine.reason,
            instances=tuple(sorted(instances, key=lambda each: each.slot.placement)),
        )

    def instance(self, uuid: GpuUuid, layout: Layout, has: Has) -> Instance:
        self.generation += 1
        profile = layout.by_name[has.profile]
        lease_id = None
        if has.holder:
            lease_id = LeaseId(f"lease-{self.generation}")
            self.leases[lease_id] = Lease(
                id=lease_id,
                request_id=RequestId(f"request-{self.generation}"),
                holder=Holder(name=has.holder),
                instances=(Generation(self.generation),),
                created_at=has.since,
                expires_at=has.expires_at,
            )
        return Instance(
            slot=Slot(uuid, profile, Placement(has.start, profile.memory_slices)),
            generation=Generation(self.generation),
            state=InstanceState(has.state),
            gpu_instance_id=None if profile.kind.takes_whole_gpu else self.generation,
            compute_instance_id=None if profile.kind.takes_whole_gpu else 0,
            uuid=uuid if profile.kind.takes_whole_gpu else f"MIG-{self.generation}",
            lease=lease_id,
            since=has.since,
            reason=has.reason,
        )


def node(*machines: Machine, revision: int = 1) -> NodeView:
    """A node with these GPUs."""
    builder = _Builder()
    gpus = tuple(builder.gpu(index, machine) for index, machine in enumerate(machines))
    return NodeView(node="test", revision=revision, gpus=gpus, leases=builder.leases)


def memory(text: str, *, min_compute: int = 1, attributes: Sequence[str] = ()) -> Want:
    """A want for memory."""
    return Want(
        memory_bytes=parse_memory(text), min_compute_slices=min_compute, attributes=frozenset(attributes), text=text
    )


def profile(name: str) -> Want:
    """A want for a profile."""
    return Want(profile=name, text=name)


def fraction(value: float) -> Want:
    """A want for a fraction of a GPU."""
    return Want(fraction=value)


WHOLE = Want(whole_gpu=True)


def request(*wants: Want, gpus: Sequence[str] = (), if_revision: int | None = None, priority: int = 0) -> Request:
    """A request for these wants together."""
    return Request(wants=wants, gpus=tuple(gpus), if_revision=if_revision, priority=priority)


# Strategies

_STATES = ("leased", "idle", "idle", "foreign", "blocked", "creating", "destroying")


@st.composite
def machines(draw: st.DrawFn, layouts: Sequence[Layout] = LAYOUTS, states: Sequence[str] = _STATES) -> Machine:
    """A GPU with instances that can stand side by side on the hardware, by their slices and by their engines."""
    layout = draw(st.sampled_from(layouts))
    has: list[Has] = []
    mask, engines = 0, [0] * 6
    for _ in range(draw(st.integers(0, 7))):
        each = draw(st.sampled_from(layout.profiles))
        place = draw(st.sampled_from(each.placements))
        taken = [one + other for one, other in zip(engines, each.engines.as_tuple(), strict=True)]
        fits = all(count <= total for count, total in zip(taken, layout.engines.as_tuple(), strict=True))
        if mask & place.mask or not fits:
            continue
        mask, engines = mask | place.mask, taken
        state = draw(st.sampled_from(states))
        holder = draw(st.sampled_from(("alice", "bob", "pod team-a/train"))) if state in {"leased", "creating"} else ""
        has.append(Has(each.name, place.start, state, holder, since=float(draw(st.integers(0, 5)))))
    return Machine(layout, tuple(has))


@st.composite
def nodes(
    draw: st.DrawFn, layouts: Sequence[Layout] = LAYOUTS, most: int = 4, states: Sequence[str] = _STATES
) -> NodeView:
    """A node with 1 to `most` GPUs, all in MIG mode."""
    return node(*draw(st.lists(machines(layouts, states), min_size=1, max_size=most)))


def wants_for(layouts: Sequence[Layout] = LAYOUTS) -> st.SearchStrategy[Want]:
    """Anything that could be wanted of such GPUs."""
    names = sorted({each.name for layout in layouts for each in layout.profiles})
    sizes = sorted({each.memory_mib for layout in layouts for each in layout.profiles})
    amounts = st.sampled_from(sizes).flatmap(lambda mib: st.sampled_from((mib - 1, mib, mib + 1, mib // 2)))
    attributes = st.sampled_from((frozenset[str](),) * 5 + (frozenset({"+me"}), frozenset({"+gfx"})))
    compute = st.sampled_from((1, 1, 1, 1, 2, 3))
    return st.one_of(
        st.sampled_from(names).map(profile),
        st.builds(
            lambda mib, least, with_: Want(memory_bytes=mib << 20, min_compute_slices=least, attributes=with_),
            amounts,
            compute,
            attributes,
        ),
        st.sampled_from((0.05, 0.125, 0.25, 0.3, 0.5, 0.75, 1.0)).map(fraction),
    )
