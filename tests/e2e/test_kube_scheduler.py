"""Pods placed by Kubernetes' own kube-scheduler, which asks the agents of two nodes: by an extender, or by a plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from mig_agent.client import Plan
from mig_agent.client.types import NoPlan
from support.cluster import kubescheduler
from support.cluster.api import Api, ApiError
from support.cluster.cluster import Cluster
from support.cluster.pods import MEMORY, condition, container, is_unschedulable, phase, pod
from support.cluster.scheduling import promised_to
from support.cluster.space import Space

TOO_MANY = ["80G"] * 3
"""Devices that no node has room for, empty as it may be."""
REFUSED = "refused"
POLICY = "bindings-that-tests-refuse"
WORDS = "no test pod of this name is bound"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


@pytest.fixture(scope="module")
def programs(listening: Cluster) -> Cluster:
    kubescheduler.load_images(listening)
    return listening


def ask(space: Space, name: str, devices: list[str]) -> None:
    limits = {f"{MEMORY}{each.lower()}": devices.count(each) for each in devices}
    space.create(pod(name, [container(limits=limits)], schedulerName=kubescheduler.NAME))


def best(space: Space, memory: str) -> str:
    """The node whose agent's plan is the best one now."""
    plans = {node: agent.plan(gpu_memory=memory) for node, agent in space.agents.items()}
    return min((plan.score, node) for node, plan in plans.items() if isinstance(plan, Plan))[1]


@contextmanager
def refusing_bindings(api: Api) -> Iterator[None]:
    """As an admission policy of the cluster may: pods named `refused` are not bound; in force from the first moment."""
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}]
    validation = {"expression": f"object.metadata.name != '{REFUSED}'", "message": WORDS}
    policy = {"matchConstraints": {"resourceRules": rules}, "validations": [validation]}
    kinds = {
        "validatingadmissionpolicies": policy,
        "validatingadmissionpolicybindings": {"policyName": POLICY, "validationActions": ["Deny"]},
    }
    for kind, spec in kinds.items():
        api.create(f"{_ADMISSION}/{kind}", {"metadata": {"name": POLICY}, "spec": spec})
    try:
        yield
    finally:
        for kind in kinds:
            api.delete(f"{_ADMISSION}/{kind}/{POLICY}")


def is_refused(space: Space) -> bool:
    """Whether that policy is in force already."""
    body = {"metadata": {"name": REFUSED}, "target": {"kind": "Node", "name": "n1"}}
    try:
        space.cluster.api.call("POST", f"{space.path}/pods/{REFUSED}/binding", body, dryRun="All")
    except ApiError as error:
        return WORDS in str(error)
    return False


def told(space: Space, name: str) -> str:
    """Why a pod waits, in its condition and in its events."""
    return " ".join([condition(space.pods()[name], "PodScheduled").get("message", ""), *space.events(name)])


@pytest.mark.parametrize("kind", kubescheduler.KINDS)
def test_it_places_pods(kind: str, programs: Cluster, wide_space: Space) -> None:
    space = wide_space
    with kubescheduler.installed_on(programs, kind), refusing_bindings(programs.api):
        ask(space, "full", TOO_MANY)
        space.create(yaml.safe_load((kubescheduler.EXAMPLE / "pod.yaml").read_text()))
        # Each lands where it is planned best, with the very instance that was promised to it.
        for name, memory in (("small", "5G"), ("large", "80G")):
            node = best(space, memory)
            ask(space, name, [memory])
            found = space.until_running(name)[name]
            assert found["spec"]["nodeName"] == node, kubescheduler.logs(programs)
            lease = space.lease(name)
            assert promised_to(found) == [each.uuid for each in lease.devices] == space.visible(name)
            assert lease.arrived
        # What is refused in the last moment leaves no lease behind, and is tried again.
        space.until(lambda _: is_refused(space), "bindings are refused")
        ask(space, REFUSED, ["5G"])
        space.until(lambda _: WORDS in told(space, REFUSED), "it is told that its binding was refused")
        space.until(lambda _: REFUSED not in space.leases(), "its lease has ended")
        programs.api.delete(f"{_ADMISSION}/validatingadmissionpolicybindings/{POLICY}")
        found = space.until_running(REFUSED)[REFUSED]
        assert promised_to(found) == space.visible(REFUSED)
        # A pod without room is told so by the agents.
        plans = [agent.plan(devices=TOO_MANY) for agent in space.agents.values()]
        why = [plan.message for plan in plans if isinstance(plan, NoPlan)]
        assert len(why) == len(plans)
        space.until(
            lambda pods: is_unschedulable(pods["full"]) and all(words in told(space, "full") for words in why),
            f"it is told why: {why}",
        )
        # Leases end with their pods: the one of the example has ended by itself.
        found = space.until(lambda pods: phase(pods["train"]) == "Succeeded", "it is done")["train"]
        assert space.log("train", "train") == f"training on {promised_to(found)[0]}\n"
        space.delete("small")
        space.until(lambda _: set(space.leases()) == {"large", REFUSED}, "leases end with their pods")
