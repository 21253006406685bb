"""`top` of several nodes: one list of the instances of all, once and live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mig_agent.client import to_json
from mig_agent.client.types import ComputeUsage, Status, Usage
from mig_agent.kubectl.agent_pods import AgentPod
from mig_agent.migctl import nodes_top
from mig_agent.migctl.answers import Answer
from mig_agent.migctl.nodes_top import TopAnswer
from mig_agent.migctl.top_live import render
from mig_agent.migctl.top_view import View, page, plain


def usage(used: int, compute: float | None = None) -> Usage:
    measured = (
        None
        if compute is None
        else ComputeUsage(seconds=2.0, sm_percent=compute, tensor_percent=None, memory_bandwidth_percent=None)
    )
    return Usage(
        generation=1,
        memory_used_mib=used,
        memory_total_mib=9984,
        utilization_percent=None,
        processes=(),
        compute=measured,
    )


def answer(name: str, node: Status, used: int, compute: float | None = None) -> Answer[TopAnswer]:
    """As the agent's pod prints it."""
    encoded = to_json.top(node, {1: usage(used, compute)})
    pod = AgentPod(node=name, name=f"pod-{name}")
    return Answer(pod, nodes_top.of_json(encoded, pod))


@pytest.fixture
def three(node: Status) -> tuple[Answer[TopAnswer], ...]:
    """Two nodes that answer, and one that does not."""
    leased = node.gpus[0].instances[0]
    busy = replace(node, gpus=(replace(node.gpus[0], instances=(replace(leased, holder="carol"),)),))
    silent: Answer[TopAnswer] = Answer(AgentPod(node="n3", name="pod-n3"), trouble="no answer within 10 s")
    return answer("n1", node, 512), answer("n2", busy, 8192, 90.0), silent


def listed(answers: Sequence[Answer[TopAnswer]], view: View) -> list[str]:
    return render(nodes_top.read(answers, "node"), view).splitlines()


def test_one_list_of_all_nodes_in_the_order_asked_for(three: tuple[Answer[TopAnswer], ...]) -> None:
    head, _, header, silent, first, second = listed(three, View(order="memory"))
    assert head == "3 nodes, no answer from 1 node, 2 leases, 8.5 GiB used of 19.5 GiB leased"
    assert header.split() == ["NODE", "GPU", "PROFILE", "STATE", "USED", "OF", "COMPUTE", "HOLDER"]
    assert silent == "n3: no answer within 10 s"
    assert first.split()[:6] == ["n2", "0", "1g.10gb", "leased", "8", "GiB"]
    assert first.split()[-3:] == ["90%", "#########.", "carol"]
    assert second.split()[0] == "n1"
    assert second.split()[-2:] == ["?", "alice"], "unknown, and never 0"
    assert listed(three, View())[-2].startswith("n1")
    assert [line[:2] for line in listed(three, View(words="n2"))[4:]] == ["n2"]


def test_the_live_page_has_the_nodes_too(three: tuple[Answer[TopAnswer], ...]) -> None:
    screen = plain(page(nodes_top.read(three, "node"), View(order="compute"), 80, 24)).splitlines()
    assert max(map(len, screen)) <= 80
    assert screen[3] == "n3: no answer within 10 s"
    assert screen[4].startswith("n2")
    assert screen[4].endswith("carol")


def test_json_is_what_each_agent_printed(three: tuple[Answer[TopAnswer], ...]) -> None:
    found = nodes_top.encode(three, "node")
    assert isinstance(found, dict)
    assert isinstance(found["nodes"], list)
    first, _, silent = found["nodes"]
    assert isinstance(first, dict)
    assert first["top"] == (three[0].found and three[0].found.json)
    assert (first["node"], first["pod"], first["error"]) == ("n1", "pod-n1", None)
    assert silent == {"node": "n3", "pod": "pod-n3", "top": None, "error": "no answer within 10 s"}
