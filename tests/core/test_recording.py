"""A recording is planned again to the same plans, on any node and for any request; it holds no request ids."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.core.errors import Refusal, UsageError
from mig_agent.core.model import CallerId, NodeView, Request, RequestId, Want
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner, ProcessOwner, StreamOwner
from mig_agent.core.planning.plan import Plan, Policy, Reuse
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.recording import (
    FORMAT,
    RecordedPlan,
    Recording,
    describe,
    from_json,
    record,
    replay,
    to_json,
)
from support.nodes import A100_80, H100, Has, Machine, node, nodes, profile, request, wants_for, whole

NOW = 1_800_000_000.0


def recorded(view: NodeView, *requests: Request, policy: Policy | None = None) -> Recording:
    policy = policy or Policy()
    plans = tuple(RecordedPlan(request=each, outcome=plan(view, each, policy, NOW)) for each in requests)
    return record(view, policy, NOW, plans, "0.1.0")


@settings(max_examples=40)
@given(
    view=nodes(),
    wants=st.lists(wants_for(), min_size=1, max_size=3),
    reuse=st.sampled_from(Reuse),
    cost=st.sampled_from((0.0, 2.0, 8.0)),
)
def test_any_plan_and_any_refusal_is_made_again(view: NodeView, wants: list[Want], reuse: Reuse, cost: float) -> None:
    policy = Policy(creation_cost=cost, reuse=reuse)
    of = recorded(view, request(*wants), *(request(each, gpus=["0"]) for each in wants), policy=policy)
    again = from_json(to_json(of))
    assert again == replace(of, view=again.view)
    assert (again.view.gpus, dict(again.view.leases)) == (of.view.gpus, dict(of.view.leases))
    assert all(each.is_identical for each in replay(again))
    assert to_json(again) == to_json(of)


def test_a_whole_gpu_and_every_kind_of_owner_and_number() -> None:
    view = node(whole(), Machine(H100, (Has("1g.10gb", 0, "leased", "alice", expires_at=NOW + 60),)))
    pod = PodOwner(pod=Pod(namespace="a", name="b"), devices=(KubeletDevice(resource="r", id="1"),), is_bound=True)
    owners = (pod, ProcessOwner(pid=7, started=8), StreamOwner(process=ProcessOwner(pid=7)))
    asked = [replace(request(Want(whole_gpu=True, text="whole")), owner=each, wait_seconds=math.inf) for each in owners]
    again = from_json(to_json(recorded(view, *asked)))
    assert [each.request.owner for each in again.plans] == list(owners)
    assert again.plans[0].request.wait_seconds == math.inf
    assert all(each.is_identical for each in replay(again))


def test_another_planner_is_noticed() -> None:
    of = recorded(node(Machine(A100_80)), request(profile("1g.10gb")))
    (one,) = of.plans
    assert isinstance(one.outcome, Plan)
    changed = replace(of, plans=(replace(one, outcome=replace(one.outcome, cost=1.5)),))
    (found,) = replay(from_json(to_json(changed)))
    assert not found.is_identical
    assert describe(found.outcome, of.view) != describe(found.recorded.outcome, of.view)
    assert "on GPU 0" in describe(found.outcome, of.view)


def test_refusals_are_compared_by_every_word() -> None:
    of = recorded(node(Machine(A100_80, (Has("7g.80gb", 0, "leased", "bob"),))), request(profile("1g.10gb")))
    (one,) = of.plans
    assert isinstance(one.outcome, Refusal)
    assert "bob" in describe(one.outcome, of.view)
    changed = replace(of, plans=(replace(one, outcome=replace(one.outcome, hint="another")),))
    assert not any(each.is_identical for each in replay(changed))


def test_ids_of_requests_are_not_recorded() -> None:
    view = node(Machine(A100_80, (Has("1g.10gb", 0, "leased", "alice"),)))
    asked = replace(request(profile("1g.10gb")), request_id=RequestId("mine"), caller_id=CallerId("uid 1000"))
    text = to_json(recorded(view, asked))
    assert "request-1" not in text
    assert "mine" not in text
    assert "uid 1000" not in text


def test_a_layout_is_written_once() -> None:
    one, many = (len(to_json(recorded(node(*[Machine(A100_80)] * number)))) for number in (1, 8))
    assert many < 2 * one


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("hello", "it is no JSON (line 1, column 1)"),
        ("[]", "it is no recording of an agent"),
        ("{}", "it is no recording of an agent"),
        ('{"format": 2, "recording": {}}', "its format is 2, and this version reads 1"),
        ('{"format": 1, "recording": {"$": "NodeView"}}', "a NodeView has no gpus, which this version needs"),
        ('{"format": 1, "recording": {"$": "GpuState", "value": "sad"}}', "this version knows no GpuState sad"),
        ('{"format": 1, "recording": {"$": "Strange", "value": []}}', "this version knows no Strange"),
        ('{"format": 1, "recording": {"$": "set", "value": 1}}', "it is not as an agent writes it"),
        ('{"format": 1, "recording": {"$": "Placement", "start": 0, "size": 1}}', "it is no recording of an agent"),
        (
            '{"format": 1, "recording": {"$": "Placement", "start": 0, "size": 1, "new": 2}}',
            "this version knows no new of a Placement",
        ),
        ('{"format": 1, "recording": {"$ref": 5}}', "it is not as an agent writes it"),
        ('{"format": 1, "recording": {"$ref": "x"}}', "it is not as an agent writes it"),
        ('{"format": 1, "recording": {"x": 5}}', "it is not as an agent writes it"),
        ('{"format": 1, "recording": 7}', "it is no recording of an agent"),
        ("[" * 100_000, "it is no JSON"),
    ],
)
def test_what_is_no_recording_is_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_json(text, "x.json")
    assert refused.value.message == f"cannot read x.json: {why}"
    assert refused.value.hint


def test_a_field_of_a_newer_version_is_named() -> None:
    document = json.loads(to_json(recorded(node(Machine(A100_80)))))
    assert document["format"] == FORMAT
    document["recording"]["policy"]["fairness"] = 1
    with pytest.raises(UsageError, match="this version knows no fairness of a Policy") as caught:
        from_json(json.dumps(document))
    assert "the version that made it" in caught.value.hint
