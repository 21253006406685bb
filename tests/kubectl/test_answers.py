"""Many nodes are asked at once, and each has its own deadline."""

from __future__ import annotations

import json
import threading
import time

import pytest

from mig_agent.adapters.kubeapi.pod_exec import Finished
from mig_agent.client import to_json
from mig_agent.client.types import Status, Usage
from mig_agent.kubectl.agent_pods import AgentPod
from mig_agent.kubectl.agents import NoAnswerError, status_of, top_of
from mig_agent.migctl import answers as asking
from mig_agent.migctl.answers import ask_all


def test_one_that_hangs_holds_up_no_other(node: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that hangs has the only place."""
    monkeypatch.setattr(asking, "MOST_AT_ONCE", 1)
    over = threading.Event()

    def ask(pod: AgentPod) -> Status:
        if pod.node == "n1":
            over.wait(60)
        if pod.node == "n2":
            raise NoAnswerError("cannot connect")
        if pod.node == "n3":
            raise RuntimeError("a defect")
        return node

    pods = [AgentPod(node=f"n{number}", name="p") for number in range(1, 5)]
    pods.append(AgentPod(node="n5", name="p", trouble="its agent's pod is Pending"))
    began = time.monotonic()
    found = ask_all(pods, ask, 0.2)
    over.set()
    assert time.monotonic() - began < 30
    assert [each.target for each in found] == pods
    assert [each.trouble for each in found] == [
        "no answer within 0.2 s",
        "cannot connect",
        "cannot be asked: RuntimeError: a defect",
        "",
        "its agent's pod is Pending",
    ]
    assert found[3].found is node


def test_what_migctl_prints_is_the_status(node: Status) -> None:
    text = json.dumps(to_json.encode(node))
    found = status_of(Finished(0, text, "", ""))
    assert to_json.encode(found) == to_json.encode(node)


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (Finished(4, '{"error": {"message": "cannot reach the agent"}}', "migctl: ...", "exit 4"), "cannot reach"),
        (Finished(137, "", "killed", "exit 137"), "killed"),
        (Finished(-1, "", "", 'exec: "migctl": not found'), "not found"),
        (Finished(0, "hello", "", ""), "cannot decode a node"),
        (Finished(0, '{"node": "n", "gpus": [7]}', "", ""), ""),
    ],
    ids=["agent away", "killed", "no migctl", "no JSON", "nonsense"],
)
def test_what_else_it_prints_is_the_reason(done: Finished, words: str) -> None:
    if not words:
        assert status_of(done).node == "n", "what cannot be understood is left out"
        return
    with pytest.raises(NoAnswerError, match=words):
        status_of(done)


def test_what_top_prints_is_read_into_rows(node: Status) -> None:
    usage = Usage(
        generation=1, memory_used_mib=4096, memory_total_mib=9984, utilization_percent=None, processes=(4711,)
    )
    text = json.dumps(to_json.top(node, {1: usage}))
    found = top_of(Finished(0, text, "", ""), AgentPod(node="n1", name="p"))
    assert found.json == json.loads(text)
    (row,) = found.reading.rows()
    assert (row.gpu_index, row.used_mib, row.total_mib, row.compute_percent) == (0, 4096, 9984, None)
    assert (row.instance.holder, row.instance.profile, row.is_unused) == ("alice", "1g.10gb", False)
    assert [each.id for each in found.reading.node.leases] == ["l1"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"instances": 7}', '{"instances": [{"placement": 7, "usage": []}]}'])
def test_what_is_no_top_at_all(text: str) -> None:
    pod = AgentPod(node="n1", name="p")
    if "placement" in text:
        assert len(top_of(Finished(0, text, "", ""), pod).reading.rows()) == 1, "what cannot be understood is left out"
        return
    with pytest.raises(NoAnswerError, match="no answer of `migctl top -o json`"):
        top_of(Finished(0, text, "", ""), pod)
