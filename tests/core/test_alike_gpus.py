"""Several whole GPUs of one request: of one model where that can ever be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mig_agent.core.backfill import WaitingRequest, reservation
from mig_agent.core.errors import Refusal
from mig_agent.core.forecast import Forecast, Situation
from mig_agent.core.load_history import PastLeases
from mig_agent.core.model import NodeView, Want
from mig_agent.core.planning.explain import explanation
from mig_agent.core.planning.plan import Plan
from mig_agent.core.planning.planner import plan
from support.nodes import A100_40, H100, WHOLE, Has, Machine, node, request, whole

BUSY = [Has("7g.80gb", 0, "leased", "alice", expires_at=60.0)]


def gpus_of(outcome: Plan | Refusal, view: NodeView) -> Sequence[int]:
    """The indices of the GPUs of a plan."""
    assert isinstance(outcome, Plan), outcome
    return sorted(view.by_uuid[device.gpu].index for device in outcome.devices)


def test_one_model_goes_before_the_cheaper_mix() -> None:
    """Idle instances make the GPUs 0 and 1, of two models, the cheapest two."""
    view = node(Machine(A100_40, [Has("7g.40gb")]), Machine(H100, [Has("7g.80gb")]), Machine(A100_40), Machine(H100))
    assert gpus_of(plan(view, request(WHOLE, WHOLE)), view) in ([0, 2], [1, 3])


def test_a_model_that_will_have_enough_is_waited_for() -> None:
    view = node(Machine(A100_40), Machine(H100), Machine(H100, BUSY))
    refusal = plan(view, request(WHOLE, WHOLE))
    assert isinstance(refusal, Refusal)
    assert refusal.retryable
    assert refusal.message == "cannot place 2 whole GPUs of one model together: only 1 of them fits now"
    assert refusal.hint == "--wait 10m waits until all fit; --gpu 0,1 takes unlike ones now"


def test_models_are_mixed_where_none_has_enough() -> None:
    view = node(Machine(A100_40), Machine(H100))
    found = plan(view, request(WHOLE, WHOLE))
    assert gpus_of(found, view) == [0, 1]
    assert isinstance(found, Plan)
    assert found.notes == ("the GPUs are of unlike models (NVIDIA A100-SXM4-40GB, NVIDIA H100 80GB HBM3)",)


def test_models_are_mixed_where_the_request_names_the_gpus() -> None:
    view = node(Machine(A100_40), Machine(H100), Machine(H100))
    assert gpus_of(plan(view, request(WHOLE, WHOLE, gpus=["0", "1"])), view) == [0, 1]
    assert gpus_of(plan(view, request(WHOLE, WHOLE, gpus=["0", "1", "2"])), view) == [1, 2]


def test_a_foreign_instance_is_not_counted_on_to_go() -> None:
    view = node(Machine(A100_40), Machine(H100), Machine(H100, [Has("1g.10gb", 0, "foreign")]))
    assert gpus_of(plan(view, request(WHOLE, WHOLE)), view) == [0, 1]


def test_of_one_model_those_of_one_kind_go_first() -> None:
    """A program cannot use a GPU and a MIG instance at once."""
    off = replace(whole(), layout=replace(whole().layout, model=H100.model))
    view = node(Machine(H100), off, Machine(H100), off)
    assert gpus_of(plan(view, request(WHOLE, WHOLE)), view) == [1, 3]
    assert gpus_of(plan(view, request(WHOLE, WHOLE, WHOLE)), view) != []
    one_off = node(Machine(H100), off, Machine(H100))
    assert gpus_of(plan(one_off, request(WHOLE, WHOLE)), one_off) == [0, 2]


def test_other_requests_are_placed_on_any_models() -> None:
    view = node(Machine(A100_40), Machine(H100), Machine(H100, BUSY))
    seven = [Want(profile="7g.40gb"), Want(profile="7g.80gb")]
    assert gpus_of(plan(view, request(*seven)), view) == [0, 1]
    assert gpus_of(plan(view, request(WHOLE)), view) in ([0], [1])


def test_the_gpus_that_are_reserved_are_of_one_model() -> None:
    """Else they would be kept from all others for a request that cannot start there."""
    view = node(Machine(A100_40), Machine(H100, BUSY), Machine(H100, BUSY))
    waiting = WaitingRequest(request=request(WHOLE, WHOLE), seq=0, since=0.0)
    found = reservation(view, [waiting], now=100.0, limit_seconds=10.0)
    assert found is not None
    assert {view.by_uuid[each].index for each in found.gpus} == {1, 2}


def test_a_forecast_expects_the_start_when_one_model_is_free() -> None:
    view = node(Machine(A100_40), Machine(H100), Machine(H100, BUSY))
    waiting = WaitingRequest(request=request(WHOLE, WHOLE), seq=0, since=0.0)
    forecast = Forecast(
        Situation(view=view, waiting=[waiting], now=10.0, past=PastLeases(), reservation_delay=5.0), lambda: 0.5
    )
    assert forecast.advance()
    assert forecast.estimates()[0].latest == 60.0


def test_the_explanation_says_so() -> None:
    view = node(Machine(A100_40), Machine(H100), Machine(H100))
    lines = explanation(view, request(WHOLE, WHOLE))
    assert lines[:2] == ("2 whole GPUs:", "  of one model: NVIDIA H100 80GB HBM3")
    mixed = explanation(node(Machine(A100_40), Machine(H100)), request(WHOLE, WHOLE))
    assert mixed[1] == "  of unlike models, since no model has 2 that could be free: name them with --gpu to choose"
