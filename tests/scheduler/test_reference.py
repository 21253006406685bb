"""The reference scheduler over real agents: where pods go, and what becomes of leases when a part fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from support.agent import eventually
from support.placing import PATIENCE_SECONDS, Placing
from support.webserver import Says, json_of


@pytest.fixture
def there(nodes: Placing) -> Iterator[Placing]:
    yield nodes
    print(nodes.log())  # noqa: T201 -- pytest shows it with a failure
    nodes.clear()


def until_told(there: Placing, name: str, *words: str) -> None:
    """Returns when the pod's owner can read why it waits."""
    eventually(lambda: all(each in there.api.why(name) for each in words), f"{name} is told {words}", PATIENCE_SECONDS)


def test_pods_go_where_least_memory_is_wasted(there: Placing) -> None:
    there.start()
    there.pod("small", memory_5g=1)
    there.pod("large", memory_80g=1)
    there.until_bound("small", "large")
    assert there.api.node_of("small") == "one"
    assert there.api.node_of("large") == "two"
    there.check()


def test_all_devices_of_a_pod_are_one_lease(there: Placing) -> None:
    there.start()
    there.pod("several", mig_1g_10gb=2, memory_20g=1)
    there.until_bound("several")
    assert len(there.api.annotation("several")) == 3
    there.check()


def test_sidecars_are_counted_beside_the_containers(there: Placing) -> None:
    """And what only runs before them is not."""
    made = there.pod("pod", memory_5g=1)
    more = {"resources": {"limits": {"mig-agent.io/memory-5g": "1"}}}
    made["spec"]["initContainers"] = [{"name": "beside", "restartPolicy": "Always", **more}, {"name": "before", **more}]
    there.start()
    there.until_bound("pod")
    assert len(there.api.annotation("pod")) == 2
    there.check()


def test_what_is_in_the_way_is_waited_for(there: Placing) -> None:
    there.start()
    there.pod("first", mig_7g_80gb=1)
    there.until_bound("first")
    there.pod("second", mig_7g_80gb=1)
    there.pod("meanwhile", memory_5g=1)
    there.until_bound("meanwhile")
    until_told(there, "second", "two: cannot place 7g.80gb on GPU 0", "pod default/first")
    ((_, lease),) = there.leases_of("first")
    with there.client("two") as client:
        client.release(lease.id)
    del there.api.pods["first"]
    there.until_bound("second")
    there.check()


def test_a_request_that_cannot_be_meant_holds_up_nobody(there: Placing) -> None:
    there.start()
    there.pod("nonsense", mig_banana=1)
    there.pod("nothing")
    there.pod("good", memory_5g=1)
    there.until_bound("good")
    assert not there.api.node_of("nonsense")
    until_told(there, "nothing", "it asks for nothing of the agents")
    until_told(there, "nonsense", "banana")


def test_killed_between_acquire_and_bind_the_pod_gets_the_same_lease(there: Placing) -> None:
    reached, over = threading.Event(), there.api.web.over

    def hang(_pod: object) -> Says | None:
        reached.set()
        over.wait()
        return None

    there.api.before_binding = hang
    there.start()
    there.pod("pod", memory_5g=1)
    assert reached.wait(PATIENCE_SECONDS)
    ((node, before),) = there.leases_of("pod")
    there.kill()
    there.api.before_binding = lambda _pod: None
    # The other node would be better now; what is promised already comes first.
    with there.client(node) as client:
        client.cordon(0)
    there.start()
    there.until_bound("pod")
    there.check()
    ((again, after),) = there.leases_of("pod")
    assert (again, after.id) == (node, before.id)
    with there.client(node) as client:
        client.uncordon(0)


def test_a_binding_whose_answer_was_lost_is_known_for_what_it_is(there: Placing) -> None:
    """The API server bound the pod and its answer did not arrive: the lease stays."""
    tried = []

    def lose(pod: dict[str, dict[str, object]]) -> Says | None:
        tried.append(pod)
        if len(tried) > 1:
            return None
        return json_of({"message": "etcd is away"}, 500)

    there.api.before_binding = lose
    there.start()
    there.pod("pod", memory_5g=1)
    there.until_bound("pod")
    assert len(tried) == 2
    there.check()


@pytest.mark.parametrize("code", [404, 409, 422])
def test_what_cannot_be_bound_now_has_a_deadline_until_it_is(there: Placing, code: int) -> None:
    """Its lease is not released: a second scheduler, which has the same one, may be binding the pod just then."""
    refused, tried = threading.Event(), threading.Event()

    def refuse(_pod: object) -> Says | None:
        if tried.is_set():  # the second time
            refused.wait(PATIENCE_SECONDS)
            return None
        tried.set()
        return json_of({"message": "no"}, code)

    there.api.before_binding = refuse
    there.start()
    name = f"pod-{code}"
    there.pod(name, memory_5g=1)
    until_told(there, name, "cannot place it now: one: the API server says: ")
    refused.set()
    there.until_bound(name)
    there.check()
    with there.client("one") as client:
        told = [each.kind for each in client.events() if each.holder == f"pod default/{name}"]
    changes = [kind for kind in told if kind.startswith("lease-")]
    assert changes == ["lease-granted", *["lease-renewed"] * 3], "confirmed, a deadline again, confirmed"


def test_a_pod_is_not_in_its_own_way(there: Placing) -> None:
    """There is one place for it, and its own lease of a binding that was refused stands on it."""
    refused = threading.Event()

    def refuse(_pod: object) -> Says | None:
        if refused.is_set():
            return None
        refused.set()
        return json_of({"message": "no"}, 422)

    there.api.before_binding = refuse
    there.start()
    there.pod("only", mig_7g_80gb=1)
    there.until_bound("only")
    there.check()
    with there.client("two") as client:
        told = [each.kind for each in client.events() if each.holder == "pod default/only"]
    assert "lease-ended" not in told


def test_what_another_scheduler_is_binding_is_not_released(there: Placing) -> None:
    """It has the same lease, and bound the pod when this one saw no reason to."""

    def bind(name: str) -> None:
        if name == "one" and "pod" in there.api.pods:
            there.api.pods["pod"]["spec"]["nodeName"] = "one"
            there.api.node("one", cordoned=True)

    there.api.before_node = bind
    there.start()
    there.pod("pod", memory_5g=1)
    there.until_bound("pod")
    there.until_looked()
    ((node, lease),) = there.leases_of("pod")
    assert (node, lease.expires_at is None) == ("one", False), "until its agent sees the pod"


def test_what_another_scheduler_has_bound_elsewhere_is_released(there: Placing) -> None:
    there.api.before_binding = lambda pod: pod["spec"].update(nodeName="two")
    there.start()
    there.pod("pod", memory_5g=1)
    there.until_bound("pod")
    eventually(lambda: not there.leases("one"), "the lease is released", PATIENCE_SECONDS)


def test_nothing_is_taken_where_the_kubelet_has_no_devices(there: Placing) -> None:
    """As while an agent is upgraded: such a pod would fail for good."""
    for node in there.agents:
        there.api.node(node, allocatable=0)
    there.start()
    there.pod("pod", memory_5g=1)
    until_told(there, "pod", "one: the node shows no mig-agent.io/memory-5g; two: the node shows no")
    there.api.node("two")
    there.until_bound("pod")
    assert there.api.node_of("pod") == "two"
    there.check()


def test_a_cordoned_node_is_gone_around(there: Placing) -> None:
    there.api.node("one", cordoned=True)
    there.start()
    there.pod("small", memory_5g=1)
    there.until_bound("small")
    assert there.api.node_of("small") == "two"


def test_a_class_that_no_node_shows_waits(there: Placing) -> None:
    """It would run without a device otherwise: the kubelet lets pass what it does not know."""
    there.start()
    there.pod("pod", memory_7g=1)
    until_told(there, "pod", "the node shows no mig-agent.io/memory-7g")


def test_a_pod_by_environment_needs_no_numbers(there: Placing) -> None:
    """Its device comes from the annotation, on nodes that may show nothing at all."""
    for node in there.api.nodes.values():
        node["status"]["allocatable"].clear()
    there.start()
    made = there.pod("pod", memory_5g=1)
    path = "metadata.annotations['mig-agent.io/visible-devices']"
    source = {"fieldRef": {"fieldPath": path}}
    made["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": source}]
    there.until_bound("pod")
    there.check()


def test_a_node_that_changes_in_the_last_moment_is_left(there: Placing) -> None:
    """It is cordoned when something was taken there already: that is released once the pod is elsewhere."""

    def cordon(name: str) -> None:
        if name == "one":
            there.api.node("one", cordoned=True)

    there.api.before_node = cordon
    there.start()
    there.pod("pod", memory_5g=1)
    there.until_bound("pod")
    assert there.api.node_of("pod") == "two"
    eventually(lambda: not there.leases("one"), "the lease is released", PATIENCE_SECONDS)
    there.check()


def test_a_pod_that_is_gone_leaves_no_lease(there: Placing) -> None:
    tried = threading.Event()

    def go(pod: dict[str, dict[str, str]]) -> None:
        there.api.pods.pop(pod["metadata"]["name"], None)
        tried.set()

    there.api.before_binding = go
    there.start()
    there.pod("pod", memory_5g=1)
    assert tried.wait(PATIENCE_SECONDS)
    eventually(lambda: not there.leases("one") and not there.leases("two"), "the lease is released", PATIENCE_SECONDS)


def test_an_id_that_was_used_for_something_else_holds_up_nobody(there: Placing) -> None:
    uid = there.pod("pod", memory_5g=1)["metadata"]["uid"]
    for node in there.agents:
        with there.client(node) as client:
            client.acquire(mig_profile="1g.10gb", request_id=f"{uid}-1").release()
    there.start()
    there.until_bound("pod")
    there.check()


def test_what_is_wrong_for_long_is_said_once(there: Placing) -> None:
    """With what would help."""
    there.use_certificate_of("stranger")
    there.start()
    eventually(lambda: there.log().count("cannot ask the agent of") == 2, "it says so of both", PATIENCE_SECONDS)
    there.pod("pod", memory_5g=1)
    eventually(lambda: there.api.why("pod") == "no agent is ready", "pods are told", PATIENCE_SECONDS)
    there.until_looked()
    assert there.log().count("cannot ask the agent of") == 2
    assert "has no role here" in there.log()
    assert "tls_schedulers" in there.log()


def test_an_agent_that_dies_is_gone_around_and_found_again(there: Placing) -> None:
    there.start()
    there.pod("first", memory_5g=1)
    there.until_bound("first")
    there.agents["one"].kill()
    del there.api.agents["one"]
    there.pod("second", memory_5g=1)
    there.until_bound("second")
    assert there.api.node_of("second") == "two"
    there.agents["one"].log_file.unlink()
    there.agents["one"].start()
    there.listen("one")
    there.pod("third", memory_5g=1)
    there.until_bound("third")
    assert there.api.node_of("third") == "one"
    there.check()


def test_many_pods_at_once(there: Placing) -> None:
    """Plans overtake each other: nothing is given twice, and all that fits is placed."""
    names = [f"pod-{number}" for number in range(14)]
    for name in names:
        there.pod(name, memory_5g=1)
    there.start()
    there.until_bound(*names)
    there.check()
    uuids = [uuid for name in names for uuid in there.api.annotation(name)]
    assert len(set(uuids)) == len(names)


def a_gang(there: Placing, size: int, *, already: int = 0, **limits: int) -> list[str]:
    """The names of its pods, of which the first are not there yet."""
    names = [f"gang-{number}" for number in range(size)]
    for name in names[already:]:
        there.pod(name, gang=size, **limits)
    return names


def test_a_gang_is_placed_over_several_nodes_or_waits_whole(there: Placing) -> None:
    there.program = "gang.py"
    there.start()
    there.pod("before", mig_7g_80gb=1)
    there.until_bound("before")
    names = a_gang(there, 3, memory_20g=1)  # one fits on the A100 beside the single pod
    there.pod("single", memory_5g=1)
    there.until_bound("single")
    for name in names:
        until_told(there, name, "not all 3 of its gang can be placed: one: cannot ")
    assert not any(map(there.api.node_of, names))
    ((_, lease),) = there.leases_of("before")
    with there.client("two") as client:
        client.release(lease.id)
    del there.api.pods["before"]
    there.until_bound(*names)
    there.check()
    assert {there.api.node_of(name) for name in names} == {"one", "two"}


def test_a_gang_of_which_not_all_are_there_waits(there: Placing) -> None:
    there.program = "gang.py"
    there.start()
    names = a_gang(there, 2, already=1, memory_5g=1)
    there.pod("single", memory_5g=1)
    there.until_bound("single")
    assert not there.leases_of("gang-1")
    there.pod("gang-0", gang=2, memory_5g=1)
    there.until_bound(*names)
    there.check()


def test_a_gang_that_comes_pod_by_pod_is_never_bound_in_part(there: Placing) -> None:
    """Its last pod is made just when the scheduler has looked who waits; there is room for one of them."""
    there.program = "gang.py"
    a_gang(there, 2, already=1, mig_7g_80gb=1)

    def last() -> None:
        if "gang-0" not in there.api.pods:
            there.pod("gang-0", gang=2, mig_7g_80gb=1)

    there.api.after_waiting = last
    there.start()
    eventually(
        lambda: len(there.api.pods) == 2 and all(map(there.api.why, there.api.pods)), "both are told", PATIENCE_SECONDS
    )
    assert not any(map(there.api.node_of, there.api.pods))


def test_a_gang_whose_scheduler_dies_half_way_is_finished_by_the_next(there: Placing) -> None:
    bound, over = threading.Event(), there.api.web.over

    def once(pod: dict[str, dict[str, object]]) -> Says | None:
        if pod["metadata"]["name"] == "gang-0":
            bound.set()
            return None
        over.wait()
        return json_of({}, 500)

    there.program = "gang.py"
    there.api.before_binding = once
    there.start()
    names = a_gang(there, 3, memory_5g=1)
    assert bound.wait(PATIENCE_SECONDS)
    there.until_bound("gang-0")
    there.kill()
    before = {name: there.leases_of(name)[0][1].id for name in names}
    there.api.before_binding = lambda _pod: None
    there.start()
    there.until_bound(*names)
    there.check()
    assert {name: there.leases_of(name)[0][1].id for name in names} == before
