"""Explains a plan to people: every slot that was considered, what it costs, and what blocks the other GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mig_agent.core.model import Gpu, GpuState, GpuUuid, Instance, NodeView, Request, Slot, Want
from mig_agent.core.planning.alike_gpus import alike, models_of, wants_alike
from mig_agent.core.planning.blockers import describe_obstacle, describe_wants, obstacle
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.plan import COST_IN_SCORE, DEFAULT_POLICY, Policy
from mig_agent.core.planning.profiles import served_by, wasted_mib
from mig_agent.core.planning.search import NOTHING_EXCLUDED, NOTHING_RESERVED, find, named_gpus, usable_gpus
from mig_agent.core.texts import state_and_reason

MOST_LINES = 64
"""The most lines in the explanation of one request."""
LONGEST_LINE = 300
"""The longest line, in characters."""
_FEWEST_OF_A_KIND = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One slot for one device, as the policy weighs it."""

    gpu_index: int
    slot: Slot
    reuse: bool
    """True if an idle instance occupies exactly that slot."""
    victims: tuple[Instance, ...]
    waste_mib: float
    """Memory beyond what was wanted, in MiB; compared first."""
    cost: float
    """Capacity lost, plus the cost of creating and destroying; decides between equal wastes."""
    chosen: bool
    """True if the plan uses it."""

    @property
    def score(self) -> float:
        """Waste and cost in one number, as in `Plan.score`; lower is better."""
        return self.waste_mib + COST_IN_SCORE * self.cost

    def describe(self) -> str:
        """Return one line, such as `GPU 0: reuse 1g.10gb on slice 6: wastes 6169 MiB, costs 17.007, score 6169.017`.

        The chosen one ends with ` (chosen)`.
        """
        verb = "reuse" if self.reuse else "create"
        destroys = ", ".join(str(victim.slot) for victim in self.victims)
        after = f" after destroying idle {destroys}" if destroys else ""
        chosen = " (chosen)" if self.chosen else ""
        numbers = f"wastes {self.waste_mib:.0f} MiB, costs {self.cost:.3f}, score {self.score:.3f}"
        return f"GPU {self.gpu_index}: {verb} {self.slot}{after}: {numbers}{chosen}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All slots that were considered for one device or for several that are alike, each as if the device were alone."""

    want: Want
    count: int
    """How many such devices are asked for."""
    options: tuple[Option, ...]
    """The best first."""
    blocked: tuple[tuple[int, str], ...]
    """GPUs without a slot, by index, each with the reason."""
    models: str = ""
    """The models that several whole GPUs are chosen from (`alike_gpus`); empty where that is no question."""

    def lines(self, most: int = MOST_LINES) -> tuple[str, ...]:
        """Return the want, then a line for each slot and each blocked GPU, at most `most` of either."""
        shares = [option for option in self.options if option.slot.profile.kind.shares_memory]
        others = [option for option in self.options if not option.slot.profile.kind.shares_memory]
        places = [f"  {option.describe()}" for option in others[:most]]
        if shares and others and len(others) < most:
            places.append("  shares, only where nothing else fits:")
        places += [f"  {option.describe()}" for option in shares[: max(0, most - len(others))]]
        blocked = [f"  GPU {index}: no place, {why}" for index, why in self.blocked[:most]]
        return (
            f"{describe_wants([self.want] * self.count)}:",
            *([f"  {self.models}"] if self.models else ()),
            *_some(places, len(self.options) + len(places) - min(len(self.options), most), "places"),
            *_some(blocked, len(self.blocked), "GPUs"),
        )


def explanation(
    view: NodeView,
    request: Request,
    policy: Policy = DEFAULT_POLICY,
    *,
    reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    reserved_for: str = "",
    exclude: frozenset[Slot] = NOTHING_EXCLUDED,
    most: int = MOST_LINES,
) -> tuple[str, ...]:
    """Return the lines of `explanations`, about `most` of them for any number of GPUs and devices, none too long."""
    found = explanations(view, request, policy, reserved=reserved, reserved_for=reserved_for, exclude=exclude)
    share = max((most // max(len(found), 1) - 3) // 2, _FEWEST_OF_A_KIND)  # a heading, and what is left out of either
    lines = [line for each in found for line in each.lines(share)]
    return tuple(_cut(line) for line in _some(lines[:most], len(lines), "lines"))


def _some(lines: Sequence[str], there_are: int, what: str) -> Iterator[str]:
    yield from lines
    if there_are > len(lines):
        yield f"  and {there_are - len(lines)} more {what}"


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"


def explanations(
    view: NodeView,
    request: Request,
    policy: Policy = DEFAULT_POLICY,
    *,
    reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    reserved_for: str = "",
    exclude: frozenset[Slot] = NOTHING_EXCLUDED,
) -> tuple[Explanation, ...]:
    """Return what `planner.plan` weighs with the same arguments, for each kind of want of the request, in order.

    `reserved_for` says for whom the reserved GPUs are, such as `the waiting request of alice`. Several devices are
    planned together, so the chosen slot of one need not be its best. GPUs that the request does not name are left out.
    """
    found = find(view, request, policy, reserved=reserved, exclude=exclude)
    taken = [device.slot for device in found.devices] if found is not None else []
    gpus = named_gpus(view, request)
    policy = policy.of(request)
    kept = dict.fromkeys(reserved, reserved_for or "another request")
    kinds: dict[Want, list[Slot]] = {want: [] for want in request.wants}
    for want, slot in zip(request.wants, taken, strict=False):  # nothing is taken where nothing was found
        kinds[want].append(slot)
    counts = Counter(request.wants)
    models = _models(view, request)
    return tuple(
        replace(_explanation(view, gpus, want, counts[want], slots, policy, kept, exclude), models=models)
        for want, slots in kinds.items()
    )


def _models(view: NodeView, request: Request) -> str:
    usable = usable_gpus(view, request)
    if not wants_alike(request.wants) or len(models_of(usable)) == 1:
        return ""
    sets = alike(usable, request.wants)
    if sets is None:
        count = len(request.wants)
        return f"of unlike models, since no model has {count} that could be free: name them with --gpu to choose"
    return f"of one model: {' or '.join(models_of(gpu for gpus in sets.of_one_model for gpu in gpus))}"


def _explanation(  # noqa: PLR0917 -- private, and called once
    view: NodeView,
    gpus: Sequence[Gpu],
    want: Want,
    count: int,
    taken: Sequence[Slot],
    policy: Policy,
    reserved: Mapping[GpuUuid, str],
    exclude: frozenset[Slot],
) -> Explanation:
    options: list[Option] = []
    blocked: list[tuple[int, str]] = []
    for gpu in gpus:
        places = [] if _out_of_reach(gpu, reserved) else _options(gpu, want, taken, policy, exclude)
        options += places
        if not places:
            blocked.append((gpu.index, _why_not(view, gpu, want, reserved)))
    ordered = sorted(options, key=lambda option: (option.waste_mib, option.cost, option.gpu_index))
    return Explanation(want=want, count=count, options=tuple(ordered), blocked=tuple(blocked))


def _options(gpu: Gpu, want: Want, taken: Sequence[Slot], policy: Policy, exclude: frozenset[Slot]) -> list[Option]:
    profile = served_by(want, gpu)
    if profile is None:
        return []
    options = []
    for candidate in Occupancy.of(gpu, policy).candidates(profile, policy.creation_cost, exclude):
        slot = Slot(gpu.uuid, profile, candidate.window.placement)
        if want.slot is not None and slot.placement != want.slot.placement:
            continue
        options.append(
            Option(
                gpu_index=gpu.index,
                slot=slot,
                reuse=candidate.reuse is not None,
                victims=candidate.victims,
                waste_mib=wasted_mib(profile, want, gpu.layout),
                cost=candidate.cost,
                chosen=slot in taken,
            )
        )
    return options


def _out_of_reach(gpu: Gpu, reserved: Mapping[GpuUuid, str]) -> bool:
    return gpu.state in {GpuState.CORDONED, GpuState.LOST} or gpu.uuid in reserved


def _why_not(view: NodeView, gpu: Gpu, want: Want, reserved: Mapping[GpuUuid, str]) -> str:
    if gpu.state in {GpuState.CORDONED, GpuState.LOST}:
        return f"it is {state_and_reason(gpu.state, gpu.reason)}"
    profile = served_by(want, gpu)
    if profile is None:
        if want.slot is not None:
            return "the slot is on another GPU"
        return f"{gpu.layout.model} offers nothing for it"
    if gpu.uuid in reserved:
        return f"it is reserved for {reserved[gpu.uuid]}"
    return describe_obstacle(view, obstacle(view, gpu, profile, None if want.slot is None else want.slot.placement))
