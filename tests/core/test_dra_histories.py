"""Random histories of claims, leases outside DRA and GPUs that come and go, under the scheduler's exact rule.

The API server is sampled after every single write of a slice, also where the agent dies between two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from placement_bench.agent import AgentCluster, Handle
from placement_bench.allocator import Allocator

from mig_agent.core.dra.devices import PartitionableDevice, slots_by_name
from mig_agent.core.dra.pool import slices_of
from mig_agent.core.dra.relisting import Relisting, relist
from mig_agent.core.model import GpuState, GpuUuid, InstanceState, Layout, NodeView, Request, RequestId, Slot, Want
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.pinning import window_of
from mig_agent.core.planning.plan import DEFAULT_POLICY
from support.nodes import A30, A100_40, H100, RTX_PRO

MODELS = (A100_40, H100, A30, RTX_PRO)
GIB = 1 << 30


@dataclass(eq=False)
class Claim:
    """A claim that has a device; `lease` once it is prepared."""

    device: PartitionableDevice
    lease: Handle | None = None
    is_allocated: bool = True
    """False after its deletion by force, which the agent learns later."""


@dataclass
class Node:
    """GPUs under the agent, and the same node as the scheduler sees it."""

    cluster: AgentCluster
    scheduler: Allocator = field(default_factory=Allocator)
    closed: set[GpuUuid] = field(default_factory=set)
    gone: set[GpuUuid] = field(default_factory=set)

    @property
    def view(self) -> NodeView:
        """The node as the agent publishes it: GPUs may be cordoned, or no longer there."""
        gpus = tuple(
            replace(gpu, state=GpuState.CORDONED) if gpu.uuid in self.closed else gpu
            for gpu in self.cluster.view.gpus
            if gpu.uuid not in self.gone
        )
        return replace(self.cluster.view, gpus=gpus)

    def listing(self) -> Relisting:
        """The writes that are due now."""
        published = self.scheduler.published
        wanted = slices_of(self.view, self.scheduler.names, [each.content for each in published])
        return relist(published, wanted)


class Histories(RuleBasedStateMachine):
    """Everything that happens to a node with claims."""

    claims = Bundle("claims")
    leases = Bundle("leases")

    @initialize(models=st.lists(st.sampled_from(MODELS), min_size=1, max_size=3))
    def start(self, models: list[Layout]) -> None:
        self.node = Node(AgentCluster(models, DEFAULT_POLICY))
        self.claims_there: list[Claim] = []
        self.write(None)

    def write(self, most: int | None) -> None:
        """Write the slices one by one; with `most` the agent dies after so many writes."""
        change = self.node.listing()
        for number, each in enumerate(change.writes):
            if most is not None and number >= most:
                return
            self.node.scheduler.apply(Relisting(writes=(each,)))
            self.check_published()
        self.node.scheduler.apply(Relisting(deletions=change.deletions))
        self.check_published()

    def check_published(self) -> None:
        """No counter is negative, and no allocated device is missing or other than it was."""
        scheduler = self.node.scheduler
        assert scheduler.lowest >= 0
        there = {device.name: device for each in scheduler.published for device in each.content.devices}
        for name, device in scheduler.allocated.items():
            assert there.get(name) == device

    @rule(target=claims, gibibytes=st.sampled_from([4, 8, 15, 30, 45]))
    def claim_memory(self, gibibytes: int) -> object:
        return self.claim(lambda device: device.memory_mib << 20 >= gibibytes * GIB)

    @rule(target=claims, name=st.sampled_from(sorted({p.name for model in MODELS for p in model.profiles})))
    def claim_profile(self, name: str) -> object:
        return self.claim(lambda device: device.profile == name)

    def claim(self, matches: Callable[[PartitionableDevice], bool]) -> object:
        self.write(None)
        device = self.node.scheduler.allocate(matches)
        if device is None:
            return multiple()
        claim = Claim(device)
        self.claims_there.append(claim)
        return claim

    @rule(claim=claims)
    def prepare(self, claim: Claim) -> None:
        """Prepare, unless something outside DRA has the slot: then it waits, and is tried again."""
        if claim.lease is None and claim.is_allocated and claim.device.gpu not in self.node.gone:
            slot = self.slot(claim.device)
            want = Want(slot=slot)
            claim.lease = self.node.cluster.serve(Request(wants=(want,), request_id=RequestId(claim.device.name)), 0.0)

    @rule(claim=consumes(claims))
    def end(self, claim: Claim) -> None:
        """Unprepare, and the claim is free."""
        if claim.lease is not None:
            self.node.cluster.end(claim.lease, 0.0)
        if claim.is_allocated:
            self.node.scheduler.free(claim.device.name)
        self.claims_there.remove(claim)

    @rule(claim=claims)
    def delete_by_force(self, claim: Claim) -> None:
        """The scheduler may give the device out again while the old container runs."""
        if claim.is_allocated:
            self.node.scheduler.free(claim.device.name)
            claim.is_allocated = False

    @rule(target=leases, gibibytes=st.sampled_from([4, 8, 15, 30, 45]))
    def lease(self, gibibytes: int) -> object:
        """A lease outside DRA keeps off the slots of claims, as far as the agent knows them."""
        slots = self.unprepared()
        found = self.node.cluster.serve(
            Request(wants=(Want(memory_bytes=gibibytes * GIB),), request_id=RequestId("outside")), 0.0
        )
        if found is None:
            return multiple()
        mine = found[0].slot
        if any(mine.gpu == each.gpu and mine.placement.mask & each.placement.mask for each in slots):
            self.node.cluster.end(found, 0.0)
            return multiple()
        return found

    @rule(lease=consumes(leases))
    def release(self, lease: Handle) -> None:
        self.node.cluster.end(lease, 0.0)

    @rule(number=st.integers(0, 2), name=st.sampled_from(["closed", "gone"]))
    def gpu_goes_or_comes(self, number: int, name: str) -> None:
        gpus = self.node.cluster.view.gpus
        uuid = gpus[number % len(gpus)].uuid
        getattr(self.node, name).symmetric_difference_update({uuid})

    @rule(most=st.integers(0, 6))
    def die_between_writes(self, most: int) -> None:
        self.write(most)

    @rule()
    def list_all(self) -> None:
        self.write(None)
        assert not self.node.listing().writes, "a second listing has nothing to write"

    @precondition(lambda self: not self.node.gone)
    @rule(number=st.integers(0, 500))
    def what_is_offered_is_what_could_be_prepared(self, number: int) -> None:
        self.write(None)
        scheduler = self.node.scheduler
        listed = [device for each in scheduler.published for device in each.content.devices]
        device = sorted(listed, key=lambda each: each.name)[number % len(listed)]
        if device.name not in scheduler.allocated:
            free = scheduler.allocate(lambda each: each.name == device.name) is not None
            if free:
                scheduler.free(device.name)
            assert free == self.could_be_prepared(device)

    def could_be_prepared(self, device: PartitionableDevice) -> bool:
        """True if the slot is free of leases, and of slots that are allocated and not prepared yet."""
        if device.gpu in self.node.closed:
            return False
        gpu = self.node.view.by_uuid[device.gpu]
        occupancy = Occupancy.of(gpu)
        for slot in (each for each in self.unprepared() if each.gpu == gpu.uuid):
            window = window_of(occupancy, slot)
            candidate = window and occupancy.candidate_at(window, 0.0)
            if candidate:
                occupancy = occupancy.place(candidate)
        window = window_of(occupancy, self.slot(device))
        return window is not None and occupancy.candidate_at(window, 0.0) is not None

    def slot(self, device: PartitionableDevice) -> Slot:
        gpu = self.node.cluster.view.by_uuid[device.gpu]
        return slots_by_name(gpu.uuid, gpu.layout)[device.name]

    def unprepared(self) -> list[Slot]:
        return [self.slot(each.device) for each in self.claims_there if each.lease is None and each.is_allocated]

    @invariant()
    def no_two_have_one_slice(self) -> None:
        if not hasattr(self, "node"):
            return
        allocated = self.node.scheduler.allocated.values()
        for one, other in combinations(allocated, 2):
            assert one.gpu != other.gpu or not one.placement.mask & other.placement.mask
        for gpu in self.node.cluster.view.gpus:
            leased = [each.slot.placement.mask for each in gpu.instances if each.state is InstanceState.LEASED]
            assert sum(leased).bit_count() == sum(mask.bit_count() for mask in leased)

    @invariant()
    def published_is_sound(self) -> None:
        if hasattr(self, "node"):
            self.check_published()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
