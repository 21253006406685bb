"""kube-scheduler's extender over real agents, called as kube-scheduler does; with the real one in tests/e2e."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any

import pytest

from support.agent import eventually
from support.placing import PATIENCE_SECONDS, Placing
from support.webserver import Says, json_of

Json = dict[str, Any]
NODES = ["one", "two"]


@pytest.fixture
def there(nodes: Placing) -> Iterator[Placing]:
    start(nodes)
    yield nodes
    print(nodes.log())  # noqa: T201 -- pytest shows it with a failure
    nodes.clear()


def start(there: Placing) -> None:
    """Returns when it listens; it may have run before."""
    there.log_file.unlink(missing_ok=True)
    there.program = "../kube-scheduler/extender/extender.py"
    there.start()
    eventually(lambda: "listening on port" in there.log(), "the extender listens", PATIENCE_SECONDS)


def call(there: Placing, verb: str, asked: Json) -> Any:
    (port,) = re.findall(r"listening on port (\d+)", there.log())
    connection = HTTPConnection("127.0.0.1", int(port), timeout=PATIENCE_SECONDS)
    with closing(connection):
        connection.request("POST", f"/{verb}", json.dumps(asked))
        return json.load(connection.getresponse())


def look(there: Placing, verb: str, name: str) -> Any:
    return call(there, verb, {"Pod": there.api.pods[name], "NodeNames": NODES})


def bind(there: Placing, name: str, node: str) -> str:
    """Its words where it is not bound."""
    uid = there.api.pods[name]["metadata"]["uid"]
    answer = call(there, "bind", {"PodNamespace": "default", "PodName": name, "PodUID": uid, "Node": node})
    return str(answer["Error"])


def test_a_pod_is_bound_where_it_is_planned_best(there: Placing) -> None:
    there.pod("pod", memory_5g=1)
    assert look(there, "filter", "pod") == {"NodeNames": NODES, "FailedAndUnresolvableNodes": {}}
    assert look(there, "prioritize", "pod") == [{"Host": "one", "Score": 10}, {"Host": "two", "Score": 0}]
    assert not bind(there, "pod", "one")
    assert there.api.node_of("pod") == "one"
    there.check()


def test_nodes_without_room_say_why(there: Placing) -> None:
    there.pod("first", mig_7g_80gb=1)
    assert not bind(there, "first", "two")
    there.pod("second", mig_7g_80gb=1)
    answer = look(there, "filter", "second")
    assert answer["NodeNames"] == []
    assert "cannot place 7g.80gb: no such profile" in answer["FailedAndUnresolvableNodes"]["one"]
    assert "leased to pod default/first" in answer["FailedAndUnresolvableNodes"]["two"]
    assert "leased to pod default/first" in bind(there, "second", "two")
    assert not there.leases_of("second")


def test_a_node_whose_kubelet_has_no_devices_is_left_out(there: Placing) -> None:
    there.pod("pod", memory_5g=1)
    there.api.node("one", allocatable=0)
    answer = look(there, "filter", "pod")
    assert answer["NodeNames"] == ["two"]
    assert answer["FailedAndUnresolvableNodes"] == {"one": "the node shows no mig-agent.io/memory-5g"}


def test_a_binding_that_is_refused_leaves_no_lease(there: Placing) -> None:
    there.pod("pod", memory_5g=1)
    there.api.before_binding = lambda _pod: json_of({"message": "an admission policy says no"}, 422)
    assert "an admission policy says no" in bind(there, "pod", "one")
    assert not there.leases_of("pod")
    there.api.before_binding = lambda _pod: None
    assert look(there, "filter", "pod")["NodeNames"] == NODES
    assert not bind(there, "pod", "two")
    there.check()


def test_another_pod_of_the_name_is_not_bound(there: Placing) -> None:
    there.pod("pod", memory_5g=1)
    asked = {"PodNamespace": "default", "PodName": "pod", "PodUID": "another", "Node": "one"}
    assert call(there, "bind", asked) == {"Error": "the pod is gone"}
    assert not there.leases_of("pod")


def test_killed_while_it_binds_it_leads_to_the_same_node_and_lease(there: Placing) -> None:
    reached, over = threading.Event(), there.api.web.over

    def hang(_pod: object) -> Says | None:
        reached.set()
        over.wait()
        return None

    def bind_in_vain() -> None:
        with pytest.raises((OSError, HTTPException)):
            bind(there, "pod", "two")

    there.api.before_binding = hang
    there.pod("pod", memory_5g=1)
    calling = threading.Thread(target=bind_in_vain)
    calling.start()
    assert reached.wait(PATIENCE_SECONDS)
    ((_, before),) = there.leases_of("pod")
    there.kill()
    calling.join()
    there.api.before_binding = lambda _pod: None
    start(there)
    assert look(there, "filter", "pod")["NodeNames"] == ["two"]
    assert not bind(there, "pod", "two")
    there.check()
    ((_, after),) = there.leases_of("pod")
    assert after.id == before.id


def test_asked_again_while_it_binds_it_does_not_take_away_what_it_gives(there: Placing) -> None:
    """kube-scheduler takes a binding that lasts too long for failed, and asks anew."""
    reached, go_on = threading.Event(), threading.Event()
    words: list[str] = []

    def refuse_the_first(_pod: object) -> Says | None:
        there.api.before_binding = lambda _pod: None
        reached.set()
        go_on.wait(PATIENCE_SECONDS)
        return json_of({"message": "an admission policy says no"}, 422)

    there.api.before_binding = refuse_the_first
    there.pod("pod", memory_5g=1)
    callings = [threading.Thread(target=lambda: words.append(bind(there, "pod", "one"))) for _ in range(2)]
    callings[0].start()
    assert reached.wait(PATIENCE_SECONDS)
    callings[1].start()
    go_on.set()
    for each in callings:
        each.join(PATIENCE_SECONDS)
    assert there.api.node_of("pod") == "one"
    assert "" in words
    there.check()
