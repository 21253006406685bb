"""When waiting requests are likely to start: the forecast against the queue itself, and where nothing is known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mig_agent.core.backfill import WaitingRequest
from mig_agent.core.forecast import FEWEST_LEASE_TIMES, Basis, Forecast, Situation, StartEstimate
from mig_agent.core.load_history import Demand, PastLeases
from mig_agent.core.model import Generation, Gpu, GpuState, Holder, Instance, InstanceState, LeaseId, NodeView, Request
from mig_agent.core.planning.plan import DEFAULT_POLICY, Plan
from support.nodes import A30, A100_40, Has, Machine, node, nodes, profile, request, wants_for, whole
from support.queueing import next_to_start

NOW = 1000.0
TIMES = (100.0,) * FEWEST_LEASE_TIMES


def waiting(number: int, asked: Request, *, since: float = NOW) -> WaitingRequest:
    return WaitingRequest(request=replace(asked, wait_seconds=asked.wait_seconds or math.inf), seq=number, since=since)


def situation(
    view: NodeView, *asked: WaitingRequest | Request, times: Sequence[float] = (), delay: float = 1e9
) -> Situation:
    queue = [each if isinstance(each, WaitingRequest) else waiting(number, each) for number, each in enumerate(asked)]
    return Situation(view=view, waiting=queue, now=NOW, past=PastLeases(times), reservation_delay=delay)


def draws() -> Callable[[], float]:
    return random.Random(1).random  # noqa: S311 -- the same ones every time


def estimates(of: Situation, *, runs: int = 40) -> Mapping[int, StartEstimate]:
    forecast = Forecast(of, draws(), runs=runs)
    assert forecast.advance()
    return forecast.estimates()


def full(since: float = NOW, expires_at: float | None = None, holder: str = "alice") -> Machine:
    return Machine(A100_40, (Has("7g.40gb", 0, "leased", holder, since=since, expires_at=expires_at),))


# ---------------------------------------------------------------- against the queue


class Reference:
    """The queue over a node whose leases all have a deadline, each lasting until then; nothing stays idle."""

    def __init__(self, of: Situation) -> None:
        self.of = of
        self.view = replace(of.view, gpus=tuple(map(_without_idle, of.view.gpus)))
        self.ends = sorted((lease.expires_at or math.inf, name) for name, lease in of.view.leases.items())
        self.waiting = list(of.waiting)
        self.starts: dict[int, float] = {}
        self.generations = itertools.count(1_000_000)

    def run(self) -> dict[int, float]:
        self.start_what_fits(NOW)
        while self.ends:
            moment, lease = self.ends.pop(0)
            gpus = (
                replace(gpu, instances=tuple(each for each in gpu.instances if each.lease != lease))
                for gpu in self.view.gpus
            )
            self.view = replace(self.view, gpus=tuple(gpus))
            self.start_what_fits(moment)
        return self.starts

    def start_what_fits(self, now: float) -> None:
        while True:
            found = next_to_start(
                self.view,
                [self.of.ranked(each, now) for each in self.waiting],
                DEFAULT_POLICY,
                now,
                limit_seconds=self.of.reservation_delay,
                strict_fifo=self.of.strict_fifo,
            )
            if found is None:
                return
            self.carry_out(*found, now)

    def carry_out(self, started: WaitingRequest, plan: Plan, now: float) -> None:
        self.waiting = [each for each in self.waiting if each.seq != started.seq]
        self.starts[started.seq] = now
        lease = LeaseId(f"request {started.seq}")
        gpus = list(self.view.gpus)
        for device in plan.devices:
            number = next(number for number, gpu in enumerate(gpus) if gpu.uuid == device.gpu)
            made = Instance(
                slot=device.slot,
                generation=Generation(next(self.generations)),
                state=InstanceState.LEASED,
                gpu_instance_id=1,
                compute_instance_id=0,
                lease=lease,
            )
            ordered = sorted((*gpus[number].instances, made), key=lambda each: each.slot.placement)
            gpus[number] = replace(gpus[number], instances=tuple(ordered))
        self.view = replace(self.view, gpus=tuple(gpus))
        if started.request.ttl_seconds is not None:
            self.ends = sorted([*self.ends, (now + started.request.ttl_seconds, lease)])


def _without_idle(gpu: Gpu) -> Gpu:
    return replace(gpu, instances=tuple(each for each in gpu.instances if each.state is not InstanceState.IDLE))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Leases that end at moments of their own, and requests that last a time of their own, or for ever."""
    layouts = [A100_40, A30]
    view = draw(nodes(layouts, most=3, states=("leased", "leased", "leased", "foreign", "idle")))
    moments = draw(st.permutations(range(100, 200)))
    ends = dict(zip(view.leases, moments, strict=False))
    leases = {
        name: replace(each, expires_at=NOW + ends[name], created_at=NOW - 1) for name, each in view.leases.items()
    }
    asked = []
    waited = draw(st.lists(st.integers(0, 100), min_size=1, max_size=6))
    for number, seconds in enumerate(sorted(waited, reverse=True)):
        wants = draw(st.lists(wants_for(layouts), min_size=1, max_size=2))
        made = request(*wants, priority=draw(st.sampled_from((0, 0, 0, 1))))
        ttl = draw(st.sampled_from((None, 50.0 + number / 7, 120.0 + number / 7)))
        holder = Holder(tenant=draw(st.sampled_from(("vision", "speech"))))
        asked.append(waiting(number, replace(made, ttl_seconds=ttl, holder=holder), since=NOW - seconds))
    return replace(
        situation(replace(view, leases=leases), *asked, delay=draw(st.sampled_from((0.0, 60.0, 150.0, 1e9)))),
        strict_fifo=draw(st.sampled_from((False, False, True))),
        used=draw(st.sampled_from((None, {"vision": 7.0}, {"vision": 7.0, "speech": 8.0}))),
    )


@settings(max_examples=80, phases=(Phase.generate,))
@given(situations())
def test_with_known_ends_the_forecast_is_what_the_queue_does(of: Situation) -> None:
    found = estimates(of)
    assert {seq: each.latest for seq, each in found.items()} == Reference(of).run()
    assert all(each.basis is Basis.DEADLINES and each.median is None for each in found.values())


# ---------------------------------------------------------------- by lease times


def test_the_rest_of_a_lease_goes_by_how_long_it_has_lasted() -> None:
    view = node(full(since=NOW - 40))
    found = estimates(situation(view, request(profile("7g.40gb")), request(profile("7g.40gb")), times=TIMES))
    assert found[0] == StartEstimate(
        earliest=NOW + 60, median=NOW + 60, latest=NOW + 60, basis=Basis.LEASES, leases=len(TIMES)
    )
    assert found[1].median == NOW + 160


def test_the_interval_is_as_wide_as_lease_times_are_unlike() -> None:
    times = tuple(float(each) for each in range(1, 1001))
    (found,) = estimates(situation(node(full()), request(profile("1g.5gb")), times=times)).values()
    assert found.earliest == pytest.approx(NOW + 100, abs=30)
    assert found.median == pytest.approx(NOW + 500, abs=40)
    assert found.latest == pytest.approx(NOW + 900, abs=30)


def test_a_deadline_is_an_upper_bound() -> None:
    view = node(full(expires_at=NOW + 30))
    (found,) = estimates(situation(view, request(profile("7g.40gb")), times=TIMES)).values()
    assert (found.earliest, found.latest) == (NOW + 30, NOW + 30)


def test_a_lease_with_a_deadline_goes_by_how_well_others_kept_theirs() -> None:
    view = node(full(since=NOW - 10, expires_at=NOW + 990))
    of = situation(view, request(profile("7g.40gb")), times=TIMES)
    of = replace(of, past=PastLeases(TIMES, (0.8,) * FEWEST_LEASE_TIMES))
    found = estimates(of)
    assert found[0].median == pytest.approx(NOW + 790), "and not 90 s, as leases without one"


def test_a_lease_that_outlasts_all_before_it_ends_nobody_knows_when() -> None:
    view = node(full(since=NOW - 5000))
    assert estimates(situation(view, request(profile("7g.40gb")), times=TIMES)) == {}
    bounded = node(full(since=NOW - 5000, expires_at=NOW + 500))
    assert estimates(situation(bounded, request(profile("7g.40gb")), times=TIMES))[0].latest == NOW + 500


def test_an_upper_bound_that_is_not_known_is_left_out() -> None:
    times = (*(50.0,) * 50, 10_000.0)
    ages = [Machine(A100_40, (Has("7g.40gb", 0, "leased", "old", since=NOW - 20_000),)) for _ in range(20)]
    (found,) = estimates(situation(node(full(), *ages), request(profile("7g.40gb"), gpus=["0"]), times=times)).values()
    assert found.earliest is not None
    assert found.latest is None, "20 of 71 leases last longer than is known"


def test_few_leases_are_no_basis() -> None:
    few = TIMES[1:]
    assert estimates(situation(node(full()), request(profile("7g.40gb")), times=few)) == {}
    (found,) = estimates(situation(node(full(expires_at=NOW + 9)), request(profile("7g.40gb")), times=few)).values()
    assert (found.basis, found.earliest, found.median, found.latest) == (Basis.DEADLINES, NOW, None, NOW + 9)


@pytest.mark.parametrize("state", [GpuState.CORDONED, GpuState.LOST])
def test_nothing_is_said_where_no_lease_has_to_end_but_an_administrator_has_to_act(state: GpuState) -> None:
    view = node(replace(full(), state=state))
    assert estimates(situation(view, request(profile("7g.40gb")), times=TIMES)) == {}


def test_foreign_instances_are_taken_to_stay() -> None:
    view = node(Machine(A100_40, (Has("7g.40gb", 0, "foreign"),)), full())
    found = estimates(situation(view, *(request(profile("7g.40gb")) for _ in range(2)), times=TIMES))
    assert [each.median for each in found.values()] == [NOW + 100, NOW + 200]


def test_whole_gpus() -> None:
    view = node(whole("leased", "alice"))
    view = replace(view, leases={name: replace(each, created_at=NOW) for name, each in view.leases.items()})
    asked = [Request(wants=(replace(profile(""), profile=None, whole_gpu=True),)) for _ in range(2)]
    found = estimates(situation(view, *asked, times=TIMES))
    assert [each.median for each in found.values()] == [NOW + 100, NOW + 200]


def test_requests_to_come_are_expected_to_come_as_before() -> None:
    """Small ones come all the time and are served at once, until the large one has waited past the delay."""
    view = node(Machine(A100_40, (Has("1g.5gb", 0, "leased", "alice", since=NOW),)))
    small = replace(request(profile("1g.5gb")), wait_seconds=math.inf)
    of = situation(view, request(profile("7g.40gb")), times=TIMES, delay=1000.0)
    alone = estimates(of)[0]
    crowded = estimates(replace(of, demand=Demand(0.05, (small,))))[0]
    assert alone.latest == NOW + 100
    assert crowded.median is not None
    assert NOW + 1000 <= crowded.median <= NOW + 1100, "100 s after it got its reservation, the last of them have ended"


def test_with_fair_share_the_tenant_that_used_least_is_expected_first() -> None:
    of = situation(
        node(full(since=NOW - 40)),
        *(replace(request(profile("7g.40gb")), holder=Holder(tenant=each)) for each in ("vision", "speech")),
        times=TIMES,
    )
    fair = replace(of, used={"vision": 7.0})
    assert [each.median for each in estimates(of).values()] == [NOW + 60, NOW + 160]
    assert [each.median for each in estimates(fair).values()] == [NOW + 160, NOW + 60]
    overdue = replace(fair, reservation_delay=50.0)
    assert [each.median for each in estimates(overdue).values()] == [NOW + 60, NOW + 160], "both are due by then"


def test_with_fair_share_requests_to_come_of_others_go_first() -> None:
    view = node(full(since=NOW - 40))
    mine, others = (replace(request(profile("7g.40gb")), holder=Holder(tenant=each)) for each in ("vision", "speech"))
    others = replace(others, wait_seconds=math.inf)
    of = replace(situation(view, mine, times=TIMES), demand=Demand(1.0, (others,)))
    assert estimates(of)[0].median == NOW + 60
    found = estimates(replace(of, used={"vision": 7.0}, reservation_delay=500.0))[0]
    assert found.earliest is not None
    assert NOW + 500 <= found.earliest <= NOW + 600, "until it has waited for the reservation delay"


def test_who_leaves_the_queue_delays_nobody_but_is_told_a_start() -> None:
    view = node(full(since=NOW - 40))
    impatient = waiting(0, replace(request(profile("7g.40gb")), wait_seconds=10.0))
    found = estimates(situation(view, impatient, waiting(1, request(profile("7g.40gb"))), times=TIMES))
    assert [each.median for each in found.values()] == [NOW + 60, NOW + 60]


def test_a_forecast_can_be_interrupted_anywhere() -> None:
    view = node(full(since=NOW - 40), full(since=NOW - 10))
    times = tuple(float(each) for each in range(50, 150))
    of = situation(view, *(request(profile("3g.20gb")) for _ in range(6)), times=times)
    forecast, turns = Forecast(of, draws()), 0
    while not forecast.advance(lambda: True):
        turns += 1
    assert turns > forecast.done > 1
    assert forecast.estimates() == estimates(of)
