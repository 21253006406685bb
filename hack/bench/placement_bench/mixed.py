"""GPUs of several models and requests for memory: under the planner, under a rule, and with instances moved freely.

Which node has which GPU is ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

from mig_agent.adapters import catalog_files
from mig_agent.core.model import Layout, NodeView, Request, RequestId, Want
from mig_agent.core.planning.exact_packing import pack
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.plan import Policy
from mig_agent.core.planning.profiles import smallest_profile
from placement_bench.agent import AgentCluster, Handle, node_of
from placement_bench.rounds import Rounds
from placement_bench.rules import Rule, plain

HandleT = TypeVar("HandleT")
_PROFILES = Path(__file__).resolve().parents[3] / "profiles"


class Places(Protocol[HandleT]):
    """GPUs that are asked for memory."""

    def take(self, want: Want) -> HandleT | None:
        """Lease an instance; None when the policy finds no slot."""

    def give_back(self, handle: HandleT) -> None:
        """End the lease of an instance."""


@cache
def model(name: str) -> Layout:
    """Return a GPU model by the name of its file in `profiles/`. Raises ValueError."""
    if not (_PROFILES / f"{name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in _PROFILES.glob("*.yaml")))
        message = f"cannot take {name} for a GPU model; there are {known}"
        raise ValueError(message)
    return catalog_files.load_model(_PROFILES / f"{name}.yaml").layout


class MixedAgent:
    """GPUs of several models under the agent's own planner."""

    def __init__(self, gpus: Sequence[Layout] | NodeView, policy: Policy) -> None:
        """Create empty GPUs, one of each model; or those of a view with their instances."""
        self._gpus = AgentCluster(gpus, policy)
        self._numbers = itertools.count(1)

    def take(self, want: Want) -> Handle | None:
        """Lease an instance by `plan`; None if it is refused."""
        return self._gpus.serve(Request(wants=(want,), request_id=RequestId(str(next(self._numbers)))), 0.0)

    def give_back(self, handle: Handle) -> None:
        """End the lease; the instance stays, idle."""
        self._gpus.end(handle, 0.0)


class MixedRules:
    """GPUs under a rule for each model, which gets the smallest profile of the model that has the memory."""

    def __init__(self, models: Sequence[Layout], rule: Callable[[Layout], Rule]) -> None:
        self._gpus = [(each, rule(each)) for each in models]
        self._masks = [0] * len(models)

    def take(self, want: Want) -> tuple[int, int] | None:
        """Lease where the rule's score is least, the first of equals."""
        found: list[tuple[float, int, int]] = []
        for number, ((layout, rule), mask) in enumerate(zip(self._gpus, self._masks, strict=True)):
            profile = smallest_profile(want, layout)
            if profile is not None:
                kind = plain(layout).index(profile)
                place = rule.choose(kind, mask)
                if place is not None:
                    found.append((float(rule.scores[kind, mask]), number, place.mask))
        if not found:
            return None
        _, gpu, taken = min(found)
        self._masks[gpu] |= taken
        return gpu, taken

    def give_back(self, handle: tuple[int, int]) -> None:
        """Destroy the instance."""
        gpu, taken = handle
        self._masks[gpu] ^= taken


class MixedRepacked:
    """GPUs whose instances may be moved freely, to another model too: whatever fits in some way is served."""

    def __init__(self, models: Sequence[Layout], policy: Policy) -> None:
        self._boards = [Occupancy.of(gpu, policy) for gpu in node_of(models).gpus]
        self._held: list[Want] = []

    def take(self, want: Want) -> Want | None:
        """Lease if an exact search finds a way to fit all."""
        if pack(self._boards, [*self._held, want]) is None:
            return None
        self._held.append(want)
        return want

    def give_back(self, handle: Want) -> None:
        """Remove the instance."""
        self._held.remove(handle)


def replay(places: Places[HandleT], rounds: Rounds) -> frozenset[str]:
    """Return the names of the pods that are served; the others are lost."""
    held: dict[str, tuple[int, HandleT]] = {}
    served = set()
    for number, arrivals in enumerate(rounds):
        for name in [name for name, (ends, _) in held.items() if ends <= number]:
            places.give_back(held.pop(name)[1])
        for asked in arrivals:
            handle = places.take(asked.want)
            if handle is not None:
                held[asked.name] = (asked.ends, handle)
                served.add(asked.name)
    return frozenset(served)
