"""A namespace of one test, on a cluster with the agent on each of its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mig_agent.client import Client, Pod
from mig_agent.client.types import Device, LeaseInfo, Status
from support.cluster import installed
from support.cluster.api import Json
from support.cluster.cluster import Cluster
from support.cluster.layout import NODE
from support.cluster.pods import ALL_TOLD, container, has_failed, is_bound, is_running, pod

PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 0.2

Pods = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Space:
    """What a test does to the cluster, and sees of it."""

    cluster: Cluster
    agent: Client
    """Of the first node."""
    name: str
    others: Mapping[str, Client] = field(default_factory=dict)
    """Of the other nodes, by their names."""

    @property
    def agents(self) -> Mapping[str, Client]:
        """Of all nodes, by their names."""
        return {NODE: self.agent, **self.others}

    @property
    def path(self) -> str:
        """Of the namespace."""
        return f"/api/v1/namespaces/{self.name}"

    # ------------------------------------------------------------ doing

    def open(self) -> None:
        """Returns when pods can be made in it."""
        self.cluster.api.create("/api/v1/namespaces", {"metadata": {"name": self.name}})
        self.until(
            lambda _: self.cluster.api.find(f"{self.path}/serviceaccounts/default"), "the namespace has an account"
        )

    def create(self, body: Json) -> None:
        """A pod."""
        self.cluster.api.create(f"{self.path}/pods", body)

    def pod(self, name: str, limits: Mapping[str, int] | None = None, **spec: object) -> None:
        """A pod with one container that tells what it sees, and stays."""
        self.create(pod(name, [container(limits=limits)], **spec))

    def running(self, name: str, limits: Mapping[str, int] | None = None) -> tuple[Device, ...]:
        """The same; returns when it runs, with the devices of its lease (none, where it asked for none)."""
        self.pod(name, limits)
        self.until_running(name)
        return self.lease(name).devices if limits else ()

    def delete(self, name: str) -> None:
        """Returns when the pod is gone, and its lease too, which ends a moment later."""
        self.cluster.api.delete(f"{self.path}/pods/{name}")
        self.until(lambda pods: name not in pods, f"{name} is gone")
        # Not by `leases`: a pod that had lost a device has two, and they need not end at the same moment.
        self.until(lambda _: name not in {each.name for each in self._leased_pods()}, f"the lease of {name} has ended")

    def close(self) -> None:
        """Nothing is left in it, nor any lease of its pods, nor any instance on the GPUs."""
        api = self.cluster.api
        apps = f"/apis/apps/v1/namespaces/{self.name}"
        for kind in (f"{apps}/deployments", f"{apps}/statefulsets", f"{self.path}/pods"):
            api.delete(kind, gracePeriodSeconds="1")
        self.until(lambda pods: not pods, "no pod is left", may_fail=True)
        self.until(lambda _: not any(each.leases for each in self.statuses()), "no lease is left", may_fail=True)
        self.until(lambda _: self._is_emptied(), "the GPUs are empty", may_fail=True)
        api.delete(self.path)

    def _is_emptied(self) -> bool:
        for agent in self.agents.values():
            agent.reclaim()
        return not self.instances()

    # ------------------------------------------------------------ seeing

    def pods(self) -> Pods:
        """By name."""
        return {each["metadata"]["name"]: each for each in self.cluster.api.items(f"{self.path}/pods")}

    def status(self, node: str = NODE) -> Status:
        """The agent's own word."""
        return self.agents[node].status()

    def statuses(self) -> list[Status]:
        """Of the agents of all nodes."""
        return [agent.status() for agent in self.agents.values()]

    def instances(self) -> list[str]:
        """The profiles of those that exist."""
        return sorted(each.profile for status in self.statuses() for gpu in status.gpus for each in gpu.instances)

    def leases(self) -> dict[str, LeaseInfo]:
        """Of this namespace's pods, by the name of the pod."""
        everything = [each for status in self.statuses() for each in status.leases]
        found = [each for each in everything if each.pod is not None and each.pod.namespace == self.name]
        assert len({each.pod.name for each in found if each.pod}) == len(found), f"a pod with two leases: {found}"
        return {each.pod.name: each for each in found if each.pod}

    def _leased_pods(self) -> list[Pod]:
        """Of this namespace, one for each lease."""
        pods = [each.pod for status in self.statuses() for each in status.leases]
        return [each for each in pods if each is not None and each.namespace == self.name]

    def lease(self, name: str) -> LeaseInfo:
        """Of a pod that has one."""
        found = self.leases()
        assert name in found, self.explain(f"the agent has no lease for {name}")
        return found[name]

    def log(self, name: str, container: str = "main", **query: str) -> str:
        text: str = self.cluster.api.call("GET", f"{self.path}/pods/{name}/log", container=container, **query)
        return text

    def environment(self, name: str, container: str = "main", **query: str) -> dict[str, str]:
        """As the container saw it, which says so by TELL."""
        lines: list[str] = []

        def is_whole(_: Pods) -> bool:
            lines[:] = self.log(name, container, **query).splitlines()
            return ALL_TOLD in lines

        self.until(is_whole, f"{container} of {name} has told what it sees", may_fail=True)
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def visible(self, name: str, container: str = "main", **query: str) -> list[str]:
        """The devices that CUDA would see in the container."""
        return self.environment(name, container, **query).get("CUDA_VISIBLE_DEVICES", "").split(",")

    def events(self, name: str) -> list[str]:
        """What was told of a pod: `REASON: words`."""
        found = self.cluster.api.items(f"{self.path}/events", fieldSelector=f"involvedObject.name={name}")
        return [f"{each['reason']}: {each['message']}" for each in found]

    def node(self, name: str = NODE) -> Json:
        return self.cluster.api.get(f"/api/v1/nodes/{name}")

    def allocatable(self, resource: str, node: str = NODE) -> int:
        """Of the node, as the scheduler sees it; 0 also where it has no such resource."""
        return int(self.node(node)["status"]["allocatable"].get(resource, 0))

    # ------------------------------------------------------------ waiting

    def until(
        self,
        done: Callable[[Pods], Any],
        what: str,
        *,
        seconds: float = PATIENCE_SECONDS,
        may_fail: bool = False,
    ) -> Pods:
        """The namespace's pods, once `done` says so; AssertionError, with what there is to know, if not in time.

        An error at once when a pod fails, which none ever does for want of a device, or a part of the cluster ends.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.cluster.check()
            pods = self.pods()
            if not may_fail:
                failed = [name for name, each in pods.items() if has_failed(each)]
                assert not failed, self.explain(f"failed while waiting until {what}: {failed}")
            if done(pods):
                return pods
            assert time.monotonic() < deadline, self.explain(f"it did not happen that {what}")
            time.sleep(_PAUSE_SECONDS)

    def until_running(self, *names: str, seconds: float = PATIENCE_SECONDS) -> Pods:
        what = f"{', '.join(names)} run"
        return self.until(lambda pods: all(is_running(pods[name]) for name in names), what, seconds=seconds)

    def until_bound(self, name: str) -> Json:
        return self.until(lambda pods: is_bound(pods[name]), f"{name} is bound to the node")[name]

    def until_allocatable(self, resource: str, count: int, node: str = NODE) -> None:
        self.until(lambda _: self.allocatable(resource, node) == count, f"{node} has {count} of {resource}")

    def explain(self, first: str) -> str:
        """For the message of a failed test."""
        told = [first]
        told += [f"pod {name}: {each['spec'].get('nodeName')} {each['status']}" for name, each in self.pods().items()]
        told += [f"event: {each}" for name in self.pods() for each in self.events(name)]
        for node in self.agents:
            resources = {
                name: count
                for name, count in self.node(node)["status"]["allocatable"].items()
                if "/mig-" in name or "/memory-" in name or "gpu" in name
            }
            told.append(f"allocatable on {node}: {resources}")
            for tell in (partial(self._agents_view, node), partial(installed.agent_log, self.cluster, node=node)):
                try:
                    told.append(tell())
                except Exception as error:  # noqa: BLE001 -- the first error is what matters
                    told.append(f"({error})")
        return "\n".join(told)

    def _agents_view(self, node: str) -> str:
        status = self.status(node)
        held = [each.profile for gpu in status.gpus for each in gpu.instances]
        return f"leases: {status.leases}\nqueue: {status.queue}\ninstances: {held}\npaused: {status.paused}"
