"""Two nodes with unlike GPUs: each agent serves its own, and what happens to one is nothing to the other."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from support.agent import eventually
from support.cluster import installed
from support.cluster import kubelet as kubelets
from support.cluster.pods import MEMORY, PROFILE, container, is_running, pod, restarts
from support.cluster.space import PATIENCE_SECONDS, Space

ON_N1, ON_N2 = f"{PROFILE}1g.5gb", f"{PROFILE}1g.20gb"
"""Profiles that only the one model has."""
MEMORY_5G = {f"{MEMORY}5g": 1}
SERVES = "echo here >/tmp/index.html; exec httpd -f -p 8080 -h /tmp"
FETCHES = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"


def node_of(space: Space, name: str) -> str:
    found: str = space.pods()[name]["spec"]["nodeName"]
    return found


def test_a_profile_is_found_where_it_is(wide_space: Space) -> None:
    space = wide_space
    space.until_allocatable(ON_N1, 14, "n1")
    space.until_allocatable(ON_N2, 8, "n2")
    space.running("small", {ON_N1: 1})
    space.running("large", {ON_N2: 1})
    assert (node_of(space, "small"), node_of(space, "large")) == ("n1", "n2")
    for name, node in (("small", "n1"), ("large", "n2")):
        (lease,) = space.status(node).leases
        assert lease.pod is not None
        assert lease.pod.name == name
        assert space.visible(name) == [device.uuid for device in lease.devices]


def test_memory_is_served_on_either_node(wide_space: Space) -> None:
    names = {node: f"on-{node}" for node in wide_space.agents}
    for node, name in names.items():
        wide_space.until_allocatable(f"{MEMORY}5g", 14, node)
        wide_space.pod(name, MEMORY_5G, nodeSelector={"kubernetes.io/hostname": node})
    wide_space.until_running(*names.values())
    profiles = {node: [device.profile for device in wide_space.lease(name).devices] for node, name in names.items()}
    assert profiles == {"n1": ["1g.5gb"], "n2": ["1g.10gb"]}


def test_a_program_outside_reaches_pods_on_both(wide_space: Space) -> None:
    """As a scheduler that is no pod does, and a pod of the other node."""
    space = wide_space
    for name in space.agents:
        space.create(pod(f"on-{name}", [container(script=SERVES)], nodeName=name))
    pods = space.until_running(*(f"on-{name}" for name in space.agents))
    for node in space.cluster.nodes:
        for name in pods:
            url = f"http://{pods[name]['status']['podIP']}:8080/"
            command = node.on_network(sys.executable, "-c", FETCHES, url)
            eventually(partial(fetched, command), f"{name} is reached from {node.name}", PATIENCE_SECONDS)


def fetched(command: list[str]) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == "here"


def test_one_nodes_kubelet_and_agent_die(wide_space: Space) -> None:
    space, there = wide_space, wide_space.cluster.node_named("n2")
    for name, resource in (("a", ON_N1), ("b", ON_N2)):
        space.running(name, {resource: 1})
    before = space.leases()
    installed.kill_agent(space.cluster, "n2")
    there.restart("kubelet")
    # Meanwhile the other node goes on as if nothing were.
    space.running("c", {ON_N1: 1})
    space.until(lambda _: kubelets.healthy(space.cluster, "n2")[ON_N2] > 0, "the kubelet has devices to give")
    space.running("d", {ON_N2: 1})
    pods, after = space.pods(), space.leases()
    for name, lease in before.items():
        assert is_running(pods[name]), name
        assert restarts(pods[name]) == 0, name
        assert (after[name].id, after[name].devices) == (lease.id, lease.devices)
