"""One GPU during planning: what is held, what is idle, and the cheapest slot for one more device."""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.core.model import Generation, Gpu, Instance, Profile, Slot
from mig_agent.core.planning.placement import Tables, Window, tables_for
from mig_agent.core.planning.plan import DEFAULT_POLICY, Policy, Reuse
from mig_agent.core.planning.shares import most_shares, share_cost, share_window, shared_mib

NO_INSTANCES: frozenset[Generation] = frozenset()
VICTIM_COST_SHARE = 0.1
"""The cost of destroying an idle instance, as a share of the cost of creating one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A slot for one device on one GPU."""

    cost: float
    """The policy's cost; lower is better."""
    age: float
    """Breaks ties between equal costs; lower is better: victims idle for longest, reuse of the latest idle one."""
    window: Window
    reuse: Instance | None
    """The idle instance in exactly that slot; None: one is created."""
    victims: tuple[Instance, ...] = ()
    """The idle instances that must be destroyed first."""


class Occupancy:
    """A GPU with some devices tentatively placed. Immutable; `place` returns the next one."""

    __slots__ = (
        "_best",
        "_not_reused",
        "engines",
        "engines_with_idle",
        "gpu",
        "held",
        "idle",
        "idle_mask",
        "idle_slots",
        "shared_mib",
        "tables",
    )

    def __init__(  # noqa: PLR0917 -- made in three places, and often
        self,
        gpu: Gpu,
        tables: Tables,
        held: int,
        engines: int,
        idle: tuple[Instance, ...],
        not_reused: frozenset[Generation] = NO_INSTANCES,
        shared_mib: int = 0,
    ) -> None:
        self.gpu = gpu
        self.tables = tables
        self.held = held
        """The slices on which nothing may be placed."""
        self.engines = engines
        """The engines taken on those slices, packed."""
        self.shared_mib = shared_mib
        """MiB of the GPU's usable memory that shares take."""
        self.idle = idle
        self.idle_mask = 0
        self.idle_slots: dict[tuple[int, int], Instance] = {}
        """The idle instances that may be reused, by profile id and start."""
        self._not_reused = not_reused
        """Idle instances that may only be destroyed."""
        self.engines_with_idle = engines
        for instance in idle:
            slot = instance.slot
            placement = slot.placement
            self.idle_mask |= placement.mask
            # Its compute instance could not be created, nor could it be removed: it can only be destroyed.
            half_made = instance.gpu_instance_id is not None and instance.compute_instance_id is None
            if not half_made and instance.generation not in not_reused:
                self.idle_slots[slot.profile.id, placement.start] = instance
            self.engines_with_idle += tables.engines_of(slot.profile)
        self._best: dict[tuple[int, float], Candidate | None] = {}

    @classmethod
    def of(cls, gpu: Gpu, policy: Policy = DEFAULT_POLICY) -> Occupancy:
        """Return the occupancy of a GPU as it is; cached for each frozen Gpu and set of reusable instances."""
        not_reused = NO_INSTANCES
        key = "occupancy"
        if policy.reuse is not Reuse.ANY:
            not_reused = frozenset(each.generation for each in gpu.idle if not policy.may_reuse(each))
            if not_reused:
                key = f"occupancy without {sorted(not_reused)}"
        occupancy = gpu.scratch.get(key)
        if isinstance(occupancy, cls):
            return occupancy
        tables = tables_for(gpu.layout)
        held = engines = 0
        idle = []
        for instance in gpu.instances:
            if instance.is_available:
                idle.append(instance)
            else:
                slot = instance.slot
                held |= slot.placement.mask
                engines += tables.engines_of(slot.profile)
        if not gpu.layout.can_create and not idle:
            held = 1  # nothing can be created on such a GPU
        occupancy = cls(gpu, tables, held, engines, tuple(idle), not_reused, shared_mib(gpu))
        gpu.scratch[key] = occupancy
        return occupancy

    def best(self, profile: Profile, creation_cost: float) -> Candidate | None:
        """Return the cheapest slot for the profile; None if it does not fit. Cached."""
        if profile.kind.shares_memory:
            return self._share(profile)
        key = (profile.id, creation_cost)
        try:
            return self._best[key]
        except KeyError:
            found = self._best[key] = self._find(profile, creation_cost)
            return found

    def candidates(
        self, profile: Profile, creation_cost: float, exclude: frozenset[Slot] = frozenset()
    ) -> list[Candidate]:
        """Return every slot for the profile outside the excluded slots, cheapest first."""
        if profile.kind.shares_memory:
            share = self._share(profile)
            there = share is None or Slot(self.gpu.uuid, profile, share.window.placement) in exclude
            return [] if share is None or there else [share]
        found = [
            self._candidate(ranked.window, ranked.cost, creation_cost)
            for ranked in self.tables.ranked(profile.id, self.held)
            if not exclude or Slot(self.gpu.uuid, ranked.window.profile, ranked.window.placement) not in exclude
        ]
        return sorted((each for each in found if each), key=lambda each: (each.cost, each.age))

    def candidate_at(self, window: Window, creation_cost: float) -> Candidate | None:
        """Return one window with its cost; None if a device in use overlaps it or it cannot be created."""
        for ranked in self.tables.ranked(window.profile.id, self.held):
            if ranked.window is window:
                return self._candidate(window, ranked.cost, creation_cost)
        return None

    def place(self, candidate: Candidate) -> Occupancy:
        """Return the occupancy after a device is placed."""
        window = candidate.window
        used = (candidate.reuse, *candidate.victims)
        return Occupancy(
            self.gpu,
            self.tables,
            self.held | window.mask,
            self.engines + self.tables.engines_of(window.profile),
            tuple(each for each in self.idle if all(each is not other for other in used)),
            self._not_reused,
            self.shared_mib + self._taken(window.profile),
        )

    def most_shares(self, profile: Profile) -> int:
        """Return how many shares of this profile fit; 0 while the whole GPU is held."""
        if self.held and not self.idle_slots:
            return 0
        return most_shares(self.gpu.layout, self.shared_mib, profile.memory_mib)

    def _taken(self, profile: Profile) -> int:
        """Return what a device takes of the memory that the GPU shares, in MiB; 0 if it is no share."""
        terms = self.gpu.layout.shares
        return terms.taken(profile.memory_mib) if profile.kind.shares_memory and terms is not None else 0

    def _share(self, profile: Profile) -> Candidate | None:
        """Return a share as a candidate; None if the whole GPU is held, or too little memory is left."""
        if not self.most_shares(profile):
            return None
        cost = share_cost(self.gpu.layout, self.shared_mib, profile.memory_mib)
        return Candidate(cost, 0.0, share_window(profile), None)

    def _find(self, profile: Profile, creation_cost: float) -> Candidate | None:
        best: Candidate | None = None
        for ranked in self.tables.ranked(profile.id, self.held):
            # The windows come by rising capacity cost, and nothing makes one cheaper than that.
            if best is not None and ranked.cost > best.cost:
                break
            found = self._candidate(ranked.window, ranked.cost, creation_cost)
            if found is not None and (
                best is None or found.cost < best.cost or (found.cost == best.cost and found.age < best.age)
            ):
                best = found
        return best

    def _candidate(self, window: Window, cost: float, creation_cost: float) -> Candidate | None:
        """Return the window as a candidate; None if the engines do not suffice, whatever idle instance is destroyed."""
        profile = window.profile
        reuse = self.idle_slots.get((profile.id, window.placement.start))
        if reuse is not None and reuse.slot.placement == window.placement:
            return Candidate(cost, -reuse.since, window, reuse)
        taken = self.engines + self.tables.engines_of(profile)
        if not profile.kind.is_created or not self.tables.engines_fit(taken):
            return None
        victims: tuple[Instance, ...] = ()
        if window.mask & self.idle_mask:
            victims = tuple(each for each in self.idle if each.slot.placement.mask & window.mask)
        if not self.tables.engines_fit(self.engines_with_idle + self.tables.engines_of(profile)):
            victims += self._engine_victims(taken, victims)
        if not victims:
            return Candidate(cost + creation_cost, 0.0, window, None)
        cost += creation_cost * (1 + VICTIM_COST_SHARE * len(victims))
        return Candidate(cost, max(each.since for each in victims), window, None, victims)

    def _engine_victims(self, taken: int, victims: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Return idle instances elsewhere on the GPU with an engine that the new one needs, such as the one of `+me`.

        Without this an idle instance could keep a request from being served, which it must never do.
        """
        tables = self.tables
        remaining = [each for each in self.idle if each not in victims]
        taken += sum(tables.engines_of(each.slot.profile) for each in remaining)
        chosen: list[Instance] = []
        while not tables.engines_fit(taken):
            missing = tables.missing_engines(taken)
            # The one that frees most of what is missing; of equals the one idle for longest.
            best = min(
                remaining, key=lambda each: (-_freed_engines(each, missing), each.since, each.slot.placement.start)
            )
            remaining.remove(best)
            chosen.append(best)
            taken -= tables.engines_of(best.slot.profile)
        return tuple(chosen)


def _freed_engines(instance: Instance, missing: tuple[int, ...]) -> int:
    engines = instance.slot.profile.engines.as_tuple()
    return sum(min(engine, lacking) for engine, lacking in zip(engines, missing, strict=True))
