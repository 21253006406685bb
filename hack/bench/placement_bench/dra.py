"""GPUs whose slots the Kubernetes scheduler gives out: its first fit with our order of listing, and with NVIDIA's.

A request is served at once or lost, on the same traces as the agent's own planner. Between two listings the scheduler
may allocate several devices; how many decides what the planner's order is worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mig_agent.core.dra.devices import PartitionableDevice, devices_of, slots_by_name
from mig_agent.core.dra.pool import ResourceSlice, slices_of
from mig_agent.core.dra.relisting import relist
from mig_agent.core.model import Layout, NodeView, Request, RequestId, Slot, Want
from mig_agent.core.planning.plan import DEFAULT_POLICY
from placement_bench.agent import AgentCluster, Handle
from placement_bench.allocator import Allocator
from placement_bench.arrivals import poisson
from placement_bench.estimates import Estimate, estimate
from placement_bench.losses import Cell
from placement_bench.mixed import MixedAgent, model, replay
from placement_bench.mixes import MIXES, NAMES, Setting
from placement_bench.options import Options, run_all
from placement_bench.replay import A_ROUND, MODELS, PODS, all_of, in_words, reached
from placement_bench.results import Check, Json, Report, Table
from placement_bench.rounds import made_up
from placement_bench.simulation import simulate

NVIDIA = "first fit, NVIDIA's order"
AGENT = "this agent's planner"
NEVER = 0
"""Listed once, as on an empty node."""
CHANGES: Mapping[str, int] = {
    "first fit, relisted after every change": 1,
    "first fit, relisted after 5 changes": 5,
    "first fit, relisted after 20 changes": 20,
    "first fit, never relisted": NEVER,
}
"""Allocations and deallocations between two listings."""
FRESH = next(iter(CHANGES))
POLICIES = (AGENT, *CHANGES, NVIDIA)
_GPUS = 8
_LOAD = 0.85
_REQUESTS = 3000
_REPEATS = 5
_MEMORY_REPEATS = 20
_WARM_UP = 0.1
_SHARE_OF_AGENT = 0.95
"""The share of the planner's acceptance that first fit must reach, in requests and in slices or memory."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """An allocated device, and the lease that Prepare acquired for it."""

    name: str
    lease: Handle


class ListedCluster:
    """GPUs under the scheduler's first fit; Prepare acquires exactly the allocated slot from the planner."""

    def __init__(
        self,
        gpus: int | Sequence[Layout],
        changes: int,
        order: Callable[[NodeView], tuple[ResourceSlice, ...]] | None = None,
    ) -> None:
        """Create empty GPUs and list their devices, by the planner's order or by `order`.

        They are listed again after so many allocations and deallocations.
        """
        self._prepared = AgentCluster(gpus, DEFAULT_POLICY)
        self.made = self._prepared.made
        self._allocator = Allocator()
        self._changes, self._since = changes, 0
        self._slots: dict[str, Slot] = {
            name: slot for gpu in self._prepared.view.gpus for name, slot in slots_by_name(gpu.uuid, gpu.layout).items()
        }
        wanted = order(self._prepared.view) if order else slices_of(self._prepared.view, frozenset())
        self._allocator.apply(relist((), wanted))

    def place(self, kind: int, now: float) -> _Taken | None:
        """Allocate a device of a profile; None if the scheduler finds none."""
        return self._allocate(lambda device: device.profile == NAMES[kind], now)

    def end(self, handle: _Taken, now: float) -> None:
        """End the claim; its instance stays, idle."""
        self._prepared.end(handle.lease, now)
        self._allocator.free(handle.name)
        self._since += 1

    def take(self, want: Want) -> _Taken | None:
        """Allocate the first MIG device with enough memory; None if the scheduler finds none."""
        wanted = want.memory_bytes or 0
        return self._allocate(lambda device: device.memory_mib << 20 >= wanted, 0.0)

    def give_back(self, handle: _Taken) -> None:
        """End the claim; its instance stays, idle."""
        self.end(handle, 0.0)

    def _allocate(self, matches: Callable[[PartitionableDevice], bool], now: float) -> _Taken | None:
        if self._changes and self._since >= self._changes:
            wanted = slices_of(self._prepared.view, self._allocator.names)
            self._allocator.apply(relist(self._allocator.published, wanted))
            self._since = 0
        device = self._allocator.allocate(matches)
        if device is None:
            return None
        self._since += 1
        want = Want(slot=self._slots[device.name])
        lease = self._prepared.serve(Request(wants=(want,), request_id=RequestId(device.name)), now)
        if lease is None:
            raise AssertionError(f"cannot prepare {device.name}, which is allocated")
        return _Taken(device.name, lease)


def nvidias_order(view: NodeView) -> tuple[ResourceSlice, ...]:
    """Return slices as NVIDIA's driver lists them: GPU by GPU, devices by name, thus starts upwards."""
    return tuple(
        ResourceSlice(
            name=f"{number:04}-{gpu.index:04}",
            devices=tuple(
                sorted(
                    devices_of(gpu.uuid, gpu.layout),
                    key=lambda each: (each.profile.replace(".", ""), each.placement.start),
                )
            ),
        )
        for number, gpu in enumerate(view.gpus, 1)
    ) + tuple(each for each in slices_of(view, frozenset()) if each.counter_sets)


@dataclass(frozen=True, slots=True)
class Line:
    """What a policy serves, in percent, with intervals over the seeds."""

    requests: Estimate
    amount: Estimate
    """Of the memory slices, or of the memory, that is requested."""

    def as_json(self, policy: str, trace: str) -> dict[str, Json]:
        """Return the line as JSON."""
        return {
            "policy": policy,
            "trace": trace,
            "acceptance_percent": self.requests.mean,
            "acceptance_percent_plus_minus": self.requests.half_width if self.requests.known else None,
            "amount_acceptance_percent": self.amount.mean,
            "amount_acceptance_percent_plus_minus": self.amount.half_width if self.amount.known else None,
        }


def run(options: Options) -> Report:
    """Run requests for profiles on equal GPUs, and requests for memory on unlike ones."""
    gpus = options.gpus[0] if options.gpus else _GPUS
    load = options.loads[0] if options.loads else _LOAD
    models = options.gpu_models or MODELS
    of_profiles = _of_profiles(gpus, load, options)
    of_memory = _of_memory(models, options)
    tables = (
        _table(f"{gpus} GPUs at load {load:g}, requests for profiles: served at once", "slices", of_profiles),
        _table(f"{in_words(models)}, requests for memory: served at once", "memory", of_memory),
    )
    data = [line.as_json(policy, "profiles") for policy, line in of_profiles.items()]
    data += [line.as_json(policy, "memory") for policy, line in of_memory.items()]
    checks = (*_checks("profiles", "slices", of_profiles), *_checks("memory", "memory", of_memory))
    return Report(part="dra", seed=options.seed, tables=tables, data=data, checks=checks)


def run_cell(cell: Cell) -> tuple[float, float]:
    """Return the percentages of requests and of slices that are served; the same whenever it is repeated."""
    arrivals = poisson(Setting(cell.mix, cell.load), cell.gpus, cell.requests, cell.seed)
    warm_up = round(_WARM_UP * cell.requests)
    if cell.policy == AGENT:
        served = simulate(AgentCluster(cell.gpus, DEFAULT_POLICY), arrivals, warm_up=warm_up)
    else:
        served = simulate(_listed(cell.policy, cell.gpus), arrivals, warm_up=warm_up)
    return 100 * served.requests, 100 * served.slices


def _listed(policy: str, gpus: int | Sequence[Layout]) -> ListedCluster:
    return ListedCluster(gpus, CHANGES.get(policy, NEVER), nvidias_order if policy == NVIDIA else None)


def _of_profiles(gpus: int, load: float, options: Options) -> dict[str, Line]:
    seeds = options.seeds(_REPEATS)
    cells = [
        Cell(policy, gpus, load, mix, options.requests or _REQUESTS, seed)
        for policy in POLICIES
        for seed in seeds
        for mix in MIXES
    ]
    found = dict(zip(cells, run_all(run_cell, cells, options.jobs), strict=True))
    lines = {}
    for policy in POLICIES:
        by_seed = [[found[each] for each in cells if (each.policy, each.seed) == (policy, seed)] for seed in seeds]
        lines[policy] = Line(
            *(estimate([statistics.fmean(each[which] for each in row) for row in by_seed]) for which in (0, 1))
        )
    return lines


def _of_memory(models: Sequence[str], options: Options) -> dict[str, Line]:
    pods = options.requests or PODS
    seeds = options.seeds(_MEMORY_REPEATS)
    by_seed = run_all(partial(_of_one_trace, tuple(models), pods), list(seeds), options.jobs)
    return {
        policy: Line(*(estimate([each[policy][which] for each in by_seed]) for which in (0, 1))) for policy in POLICIES
    }


def _of_one_trace(names: tuple[str, ...], pods: int, seed: int) -> dict[str, tuple[float, float]]:
    """Return the percentages of pods and of their memory that each policy serves of one trace."""
    models = [model(name) for name in names]
    rounds = made_up(pods, A_ROUND, seed)
    asked = all_of(rounds)
    there = reached(asked, frozenset(each.name for each in asked))
    found = {}
    for policy in POLICIES:
        if policy == AGENT:
            names_served = replay(MixedAgent(models, DEFAULT_POLICY), rounds)
        else:
            names_served = replay(_listed(policy, models), rounds)
        served = reached(asked, names_served)
        found[policy] = (100 * served.pods / there.pods, 100 * served.gigabytes / there.gigabytes)
    return found


def _table(title: str, amount: str, lines: Mapping[str, Line]) -> Table:
    return Table(
        title,
        ("policy", "% of requests", f"% of {amount}"),
        tuple((policy, line.requests.text(1), line.amount.text(1)) for policy, line in lines.items()),
    )


def _checks(trace: str, amount: str, lines: Mapping[str, Line]) -> tuple[Check, ...]:
    ours, agent = lines[FRESH], lines[AGENT]
    return tuple(
        Check(
            what=f"DRA, requests for {trace}: {what}, of the planner's",
            measured=one.mean / other.mean if other.mean else 1.0,
            bound=_SHARE_OF_AGENT,
            at_least=True,
        )
        for what, one, other in (
            ("requests", ours.requests, agent.requests),
            (amount, ours.amount, agent.amount),
        )
    )
