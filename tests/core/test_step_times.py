"""How long a plan will take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.model import NodeView, Want
from mig_agent.core.planning.plan import CreateInstance, Plan, StepTimes, expected_seconds
from mig_agent.core.planning.planner import plan
from support.nodes import H100, Has, Machine, node, nodes, profile, request, wants_for

PACE = StepTimes(create=4.0, destroy=1.0)


def seconds(view: NodeView, *wants: Want) -> float:
    outcome = plan(view, request(*wants))
    assert isinstance(outcome, Plan)
    return expected_seconds(outcome, PACE)


def test_a_reuse_takes_no_time() -> None:
    assert seconds(node(Machine(H100, [Has("1g.10gb", 6)])), profile("1g.10gb")) == 0.0


def test_what_is_in_the_way_is_destroyed_first() -> None:
    assert seconds(node(Machine(H100)), profile("7g.80gb")) == 4.0
    assert seconds(node(Machine(H100, [Has("1g.10gb", 0), Has("1g.10gb", 6)])), profile("7g.80gb")) == 6.0


def test_gpus_work_side_by_side_and_each_step_by_step() -> None:
    assert seconds(node(Machine(H100), Machine(H100)), profile("7g.80gb"), profile("7g.80gb")) == 4.0
    assert seconds(node(Machine(H100)), profile("3g.40gb"), profile("3g.40gb")) == 8.0
    one_idle = node(Machine(H100, [Has("1g.10gb", 6)]), Machine(H100, [Has("7g.80gb", 0, "leased")]))
    assert seconds(one_idle, profile("1g.10gb"), profile("1g.10gb")) == 4.0


@given(view=nodes(), wants=st.lists(wants_for(), min_size=1, max_size=4))
def test_it_lies_between_the_busiest_gpu_alone_and_all_steps_in_a_row(view: NodeView, wants: list[Want]) -> None:
    outcome = plan(view, request(*wants))
    if not isinstance(outcome, Plan):
        return
    creates = sum(isinstance(each, CreateInstance) for each in outcome.steps)
    destroys = sum(len(each.victims) for each in outcome.devices)
    in_a_row = creates * PACE.create + destroys * PACE.destroy
    gpus = len({each.gpu for each in outcome.devices if isinstance(each.serve, CreateInstance)})
    assert in_a_row / max(gpus, 1) - 1e-9 <= expected_seconds(outcome, PACE) <= in_a_row + 1e-9
    assert (outcome.creation_cost == pytest.approx(0.0)) == (creates == 0)
