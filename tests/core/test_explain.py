"""Explanations of plans: complete, and in agreement with the plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.model import GpuState, GpuUuid, NodeView, Want
from mig_agent.core.planning.explain import LONGEST_LINE, MOST_LINES, explanation, explanations
from mig_agent.core.planning.plan import Plan
from mig_agent.core.planning.planner import plan
from support.nodes import A100_40, H100, Has, Machine, memory, node, nodes, profile, request, wants_for, whole


def test_every_place_and_every_blocked_gpu_is_named() -> None:
    view = node(
        Machine(A100_40, [Has("1g.5gb", 6), Has("3g.20gb", 0, "leased", "alice")]),
        Machine(A100_40, [Has("7g.40gb", 0, "leased", "bob")]),
        Machine(A100_40, state=GpuState.CORDONED, reason="cordoned by ops"),
        whole(),
    )
    (found,) = explanations(view, request(memory("4G")))
    lines = found.lines()
    assert lines[0] == "4G:"
    assert lines[1] == "  GPU 0: reuse 1g.5gb on slice 6: wastes 1049 MiB, costs 7.003, score 1049.310 (chosen)"
    assert lines[2] == "  GPU 0: create 1g.5gb on slice 4: wastes 1049 MiB, costs 11.003, score 1049.314"
    assert lines[-3:] == (
        "  GPU 1: no place, slices 0-7 are leased to bob",
        "  GPU 2: no place, it is cordoned by ops",
        "  GPU 3: no place, NVIDIA A10 offers nothing for it",
    )


def test_victims_are_named() -> None:
    view = node(Machine(H100, [Has("1g.10gb", 0), Has("2g.20gb", 4)]))
    (found,) = explanations(view, request(profile("7g.80gb")))
    assert "create 7g.80gb on slices 0-7 after destroying idle 1g.10gb on slice 0, 2g.20gb" in found.lines()[1]


def test_a_reserved_gpu_is_no_option() -> None:
    view = node(Machine(H100))
    reserved = frozenset({view.gpus[0].uuid})
    (found,) = explanations(
        view, request(memory("4G")), reserved=reserved, reserved_for="the waiting request of alice (train)"
    )
    assert found.options == ()
    assert found.blocked == ((0, "it is reserved for the waiting request of alice (train)"),)
    assert explanations(view, request(memory("4G")), reserved=frozenset({GpuUuid("GPU-x")}))[0].options


@given(view=nodes(most=3), want=wants_for())
def test_the_best_option_is_the_plan(view: NodeView, want: Want) -> None:
    outcome = plan(view, request(want))
    (found,) = explanations(view, request(want))
    assert bool(found.options) == isinstance(outcome, Plan)
    assert {option.gpu_index for option in found.options} | {index for index, _ in found.blocked} == {
        gpu.index for gpu in view.gpus
    }
    if isinstance(outcome, Plan):
        assert found.options[0].score == pytest.approx(outcome.score)
        assert [option.slot for option in found.options if option.chosen] == [outcome.devices[0].slot]


@given(view=nodes(most=2), want=wants_for(), data=st.data())
def test_with_slots_left_out_the_best_of_the_others_is_the_plan(
    view: NodeView, want: Want, data: st.DataObject
) -> None:
    (everything,) = explanations(view, request(want))
    slots = [option.slot for option in everything.options]
    exclude = frozenset(slot for slot in slots[:3] if data.draw(st.booleans()))
    (found,) = explanations(view, request(want), exclude=exclude)
    outcome = plan(view, request(want), exclude=exclude)
    assert {option.slot for option in found.options} == set(slots) - exclude
    assert bool(found.options) == isinstance(outcome, Plan)
    if isinstance(outcome, Plan):
        assert outcome.score == pytest.approx(found.options[0].score)


def test_devices_that_are_alike_are_explained_once() -> None:
    view = node(Machine(A100_40))
    found = explanations(view, request(memory("4G"), memory("4G"), profile("3g.20gb")))
    assert [each.lines()[0] for each in found] == ["2 devices of 4G:", "3g.20gb:"]
    chosen = [option.slot for each in found for option in each.options if option.chosen]
    outcome = plan(view, request(memory("4G"), memory("4G"), profile("3g.20gb")))
    assert isinstance(outcome, Plan)
    assert sorted(map(str, chosen)) == sorted(str(each.slot) for each in outcome.devices)


@pytest.mark.parametrize("wants", [1, 40])
def test_it_is_bounded_on_a_node_of_many_gpus(wants: int) -> None:
    long = "x" * 500
    full = [Machine(A100_40, [Has("7g.40gb", 0, "leased", long)]) for _ in range(40)]
    view = node(*full, *(Machine(A100_40) for _ in range(40)))
    lines = explanation(view, request(*(memory(f"{1000 + number}M") for number in range(wants))))
    assert len(lines) <= MOST_LINES + 1
    assert max(map(len, lines)) <= LONGEST_LINE
    if wants == 1:
        assert "(chosen)" in lines[1]
        assert any(line.startswith("  and ") and line.endswith(" more places") for line in lines)
        assert lines[-1].endswith(" more GPUs")
    else:
        assert lines[-1].endswith(" more lines")


@given(view=nodes(most=3), want=wants_for())
def test_all_slots_are_explained(view: NodeView, want: Want) -> None:
    (found,) = explanations(view, request(want))
    if len(found.options) < 30 and len(found.blocked) < 30:
        assert explanation(view, request(want)) == found.lines()
