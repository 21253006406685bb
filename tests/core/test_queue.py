"""The queue: who is next, who may pass, and what is kept for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.backfill import WaitingRequest, backfill_order, gpu_share, reservation
from mig_agent.core.model import CallerId, GpuState, NodeView, Request, RequestId, RequestKey, Want
from mig_agent.core.planning.feasibility import fewest_gpus, fits_when_empty
from mig_agent.core.planning.plan import Plan, Policy
from mig_agent.core.planning.planner import plan
from mig_agent.core.queue import NONE_SEEN, PausedSearch, Queue, search
from support.nodes import (
    A30,
    A100_40,
    H100,
    WHOLE,
    Has,
    Machine,
    memory,
    node,
    nodes,
    profile,
    request,
    wants_for,
    whole,
)
from support.queueing import next_to_start

POLICY = Policy()


def named(name: str, *wants: Want, priority: int = 0, gpus: Sequence[str] = ()) -> Request:
    return replace(request(*wants, priority=priority, gpus=gpus), request_id=RequestId(name))


def key(name: str) -> RequestKey:
    return RequestKey(CallerId(""), RequestId(name))


def queue_of(*requests: tuple[float, Request]) -> Queue:
    queue = Queue()
    for now, each in requests:
        queue.add(each, now)
    return queue


def started(view: NodeView, queue: Queue, now: float, *, limit: float = 100.0, strict: bool = False) -> str | None:
    found = next_to_start(view, queue.waiting, POLICY, now, limit_seconds=limit, strict_fifo=strict)
    return None if found is None else found[0].request.request_id


def names(queue: Queue) -> list[str]:
    return [each.request.request_id for each in queue.waiting]


ONE = memory("4G")
SEVEN = profile("7g.80gb")
EMPTY = node(Machine(H100))
PARTLY = node(Machine(H100, [Has("1g.10gb", 0, "leased", "alice")]))
FULL = node(Machine(H100, [Has("7g.80gb", 0, "leased", "alice")]))


def test_first_come_is_first() -> None:
    queue = queue_of((0, named("a", ONE)), (1, named("b", ONE)), (2, named("c", ONE)))
    assert names(queue) == ["a", "b", "c"]
    assert [queue.position(key(name)) for name in "abc"] == [1, 2, 3]
    assert len(queue) == 3


def test_priority_goes_before() -> None:
    queue = queue_of((0, named("a", ONE)), (1, named("b", ONE, priority=5)), (2, named("c", ONE, priority=5)))
    assert names(queue) == ["b", "c", "a"]
    assert queue.position(key("a")) == 3


def test_removed_request_is_not_in_the_queue() -> None:
    queue = queue_of((0, named("a", ONE)), (1, named("b", ONE)))
    assert queue.get(key("a")) is not None
    left = queue.remove(key("a"))
    assert left is not None
    assert left.since == 0
    assert queue.remove(key("a")) is None
    assert queue.get(key("a")) is None
    assert queue.position(key("a")) is None
    assert queue.position(key("b")) == 1


def test_adding_a_request_twice_fails() -> None:
    queue = queue_of((0, named("a", ONE)))
    with pytest.raises(ValueError, match="cannot queue request a twice"):
        queue.add(named("a", SEVEN), 1)


def test_the_first_that_fits_starts() -> None:
    queue = queue_of((0, named("a", ONE)), (1, named("b", ONE)))
    assert started(EMPTY, queue, 2) == "a"
    assert started(FULL, queue, 2) is None
    assert started(EMPTY, Queue(), 0) is None


def test_a_later_one_may_pass_what_does_not_fit() -> None:
    queue = queue_of((0, named("large", SEVEN)), (1, named("small", ONE)))
    assert started(PARTLY, queue, 2) == "small"


def test_strict_fifo_allows_no_overtaking() -> None:
    queue = queue_of((0, named("large", SEVEN)), (1, named("small", ONE)))
    assert started(PARTLY, queue, 2, strict=True) is None
    assert started(EMPTY, queue, 2, strict=True) == "large"


@pytest.mark.parametrize(("newcomer", "strict", "starts"), [(0, False, ""), (1, False, "small"), (1, True, "")])
def test_only_the_new_request_is_tried(newcomer: int, strict: bool, starts: str) -> None:
    """What is before it is in its way all the same: by a reservation, or as strict order has it."""
    queue = queue_of((0, named("large", SEVEN)), (1, named("small", ONE)), (1, named("other", ONE)))
    only = queue.waiting[newcomer]
    now = next_to_start(PARTLY, queue.waiting, POLICY, 2, limit_seconds=100, strict_fifo=strict, only=only)
    assert (now[0].request.request_id if now is not None else "") == starts
    late = next_to_start(PARTLY, queue.waiting, POLICY, 500, limit_seconds=100, strict_fifo=strict, only=only)
    assert late is None


def test_after_the_delay_the_oldest_has_a_reservation() -> None:
    queue = queue_of((0, named("large", SEVEN)), (1, named("small", ONE)))
    assert started(PARTLY, queue, 99.9) == "small"
    assert started(PARTLY, queue, 100) is None
    assert started(EMPTY, queue, 100) == "large"


def test_a_stream_of_small_ones_never_starves_a_large_one() -> None:
    """One slice is always leased; without the reservation the large request would wait for ever."""
    queue = queue_of((0, named("large", SEVEN)))
    view, order = PARTLY, []
    for minute in range(1, 20):
        queue.add(named(f"small-{minute}", ONE), minute * 60)
        found = next_to_start(view, queue.waiting, POLICY, minute * 60, limit_seconds=300)
        if found is None:
            view = EMPTY  # the last small one ended, and nothing was put in its place
            continue
        waiting, _ = found
        queue.remove(waiting.request.key)
        order.append(waiting.request.request_id)
        if waiting.request.request_id == "large":
            break
        view = PARTLY
    assert order[-1] == "large"
    assert len(order) == 5


def test_reservation_has_the_fewest_gpus_and_those_free_soonest() -> None:
    view = node(
        Machine(H100, [Has("3g.40gb", 0, "leased"), Has("1g.10gb", 6, "leased")]),
        Machine(H100, [Has("1g.10gb", 6, "leased")]),
        Machine(H100, [Has("7g.80gb", 0, "leased")]),
    )
    queue = queue_of((0, named("large", SEVEN)), (1, named("small", ONE)))
    kept = reservation(view, queue.waiting, 500, 100)
    assert kept is not None
    assert kept.waiting.request.request_id == "large"
    assert kept.gpus == {view.gpus[1].uuid}
    # The others are free to be used meanwhile.
    found = next_to_start(view, queue.waiting, POLICY, 500, limit_seconds=100)
    assert found is not None
    assert found[0].request.request_id == "small"
    assert found[1].devices[0].gpu == view.gpus[0].uuid


def test_those_of_higher_priority_are_not_held_up() -> None:
    queue = queue_of((0, named("large", SEVEN)), (450, named("urgent", ONE, priority=1)))
    assert started(PARTLY, queue, 500) == "urgent"
    kept = reservation(PARTLY, queue.waiting, 500, 100)
    assert kept is not None
    urgent, large = queue.waiting
    assert kept.against(urgent) == frozenset()
    assert kept.against(large) == frozenset()
    later = WaitingRequest(request=named("later", ONE), seq=99, since=600)
    assert kept.against(later) == kept.gpus


def test_the_holder_of_the_reservation_may_use_any_gpu() -> None:
    view = node(Machine(H100, [Has("1g.10gb", 0, "leased")]), Machine(H100))
    queue = queue_of((0, named("large", SEVEN)))
    assert started(view, queue, 500) == "large"


def test_no_reservation_for_what_ending_leases_cannot_serve() -> None:
    foreign = node(Machine(H100, [Has("1g.10gb", 6, "foreign")]))
    queue = queue_of((0, named("large", SEVEN)), (450, named("small", ONE)))
    assert reservation(foreign, queue.waiting, 500, 100) is None
    assert started(foreign, queue, 500) == "small"
    cordoned = node(Machine(H100, state=GpuState.CORDONED), Machine(A30))
    assert reservation(cordoned, queue_of((0, named("large", SEVEN))).waiting, 500, 100) is None


def test_when_the_oldest_can_have_none_the_next_may() -> None:
    view = node(Machine(A30, [Has("1g.6gb", 0, "leased")]))
    impossible, possible = named("impossible", SEVEN), named("possible", profile("4g.24gb"))
    kept = reservation(view, queue_of((0, impossible), (1, possible)).waiting, 500, 100)
    assert kept is not None
    assert kept.waiting.request is possible


def test_reservation_for_several_devices_has_as_many_gpus_as_needed() -> None:
    view = node(*[Machine(H100, [Has("1g.10gb", 0, "leased")])] * 4)
    kept = reservation(view, queue_of((0, named("two", SEVEN, SEVEN))).waiting, 500, 100)
    assert kept is not None
    assert len(kept.gpus) == 2


def test_reservation_stays_within_named_gpus() -> None:
    view = node(Machine(H100), Machine(H100, [Has("3g.40gb", 0, "leased")]))
    kept = reservation(view, queue_of((0, named("there", SEVEN, gpus=["1"]))).waiting, 500, 100)
    assert kept is not None
    assert kept.gpus == {view.gpus[1].uuid}


def test_whole_gpus_can_be_waited_for() -> None:
    view = node(whole("leased", "alice"), whole("leased", "bob"))
    kept = reservation(view, queue_of((0, named("one", WHOLE))).waiting, 500, 100)
    assert kept is not None
    assert len(kept.gpus) == 1
    assert started(node(whole("leased", "alice"), whole()), queue_of((0, named("one", WHOLE))), 1) == "one"


def test_the_revision_was_judged_when_the_request_came() -> None:
    waiting = replace(named("a", ONE), if_revision=0)
    assert started(EMPTY, queue_of((0, waiting)), 1) == "a"


@given(view=nodes(most=3), wants=st.lists(wants_for(), min_size=1, max_size=4))
def test_the_fewest_gpus_are_enough_and_none_is_needless(view: NodeView, wants: list[Want]) -> None:
    chosen = fewest_gpus(view.gpus, wants)
    if not chosen:
        assert not fits_when_empty(view.gpus, wants, keep_foreign=True)
        return
    gpus = [gpu for gpu in view.gpus if gpu.uuid in chosen]
    assert fits_when_empty(gpus, wants, keep_foreign=True)
    for left_out in gpus:
        assert not fits_when_empty([gpu for gpu in gpus if gpu is not left_out], wants, keep_foreign=True)


@given(view=nodes((A30, A100_40, H100), most=3), wants=st.lists(wants_for((A100_40, H100)), min_size=1, max_size=6))
def test_next_to_start_is_the_first_that_the_planner_would_serve(view: NodeView, wants: list[Want]) -> None:
    queue = queue_of(*((float(number), named(str(number), want)) for number, want in enumerate(wants)))
    found = next_to_start(view, queue.waiting, POLICY, 50.0, limit_seconds=100.0)
    turns = backfill_order(view, queue.waiting, None)
    served = [each for each in turns if isinstance(plan(view, each.request), Plan)]
    assert (found[0] if found else None) == (served[0] if served else None)
    if found is not None:
        assert found[1] == plan(view, found[0].request)


@given(view=nodes((A30, H100), most=3), wants=st.lists(wants_for((A30, H100)), min_size=2, max_size=6))
def test_reserved_gpus_are_not_used_by_later_requests(view: NodeView, wants: list[Want]) -> None:
    queue = queue_of(*((float(number), named(str(number), want)) for number, want in enumerate(wants)))
    kept = reservation(view, queue.waiting, 1000.0, 100.0)
    found = next_to_start(view, queue.waiting, POLICY, 1000.0, limit_seconds=100.0)
    if kept is not None and found is not None and kept.waiting.order < found[0].order:
        assert not {device.gpu for device in found[1].devices} & kept.gpus


@given(view=nodes((A30, A100_40, H100), most=3), wants=st.lists(wants_for((A100_40, H100)), min_size=1, max_size=6))
def test_in_pieces_it_finds_the_same(view: NodeView, wants: list[Want]) -> None:
    queue = queue_of(*((float(number), named(str(number), want)) for number, want in enumerate(wants)))
    at_once = search(view, queue.waiting, POLICY, 50.0, limit_seconds=48.0)
    seen = NONE_SEEN
    pieces = 0
    while True:
        found = search(view, queue.waiting, POLICY, 50.0, limit_seconds=48.0, seen=seen, enough=lambda: True)
        pieces += 1
        if not isinstance(found, PausedSearch):
            break
        assert found.seen > seen
        seen = found.seen
    assert found == at_once
    assert pieces <= len(wants)


def test_of_those_that_fit_the_larger_goes_first() -> None:
    queue = queue_of((0, named("small", ONE)), (1, named("half", profile("4g.40gb"))), (2, named("other", ONE)))
    assert started(EMPTY, queue, 3) == "half"
    queue.remove(key("half"))
    assert started(EMPTY, queue, 3) == "small"


def test_order_is_priority_then_reservation_then_size() -> None:
    queue = queue_of((0, named("old", ONE)), (90, named("half", profile("4g.40gb"))))
    assert started(EMPTY, queue, 95) == "half"
    assert started(EMPTY, queue, 101) == "old"
    queue.add(named("urgent", ONE, priority=1), 101)
    assert started(EMPTY, queue, 101) == "urgent"


def test_the_share_of_a_request() -> None:
    view = node(Machine(H100), Machine(A30))
    assert gpu_share(view, request(SEVEN)) == 1.0
    assert gpu_share(view, request(ONE, ONE)) == 0.25
    assert gpu_share(view, request(memory("40G"))) == 0.5
    assert gpu_share(view, request(profile("9g.999gb"))) == 1.0


def test_resumed_search_tries_requests_that_came_since() -> None:
    """However many come in between, each is looked at once: the look comes to its end."""
    queue = queue_of(*((float(number), named(f"old-{number}", SEVEN)) for number in range(3)))
    seen, looks = NONE_SEEN, 0
    while True:
        found = search(FULL, queue.waiting, POLICY, 50.0, limit_seconds=100.0, seen=seen, enough=lambda: True)
        if not isinstance(found, PausedSearch):
            break
        looks += 1
        seen = found.seen
        if looks <= 5:
            queue.add(named(f"new-{looks}", profile("7g.80gb"), priority=9), 50.0)
    assert found is None
    assert looks == 3 + 5 - 1
