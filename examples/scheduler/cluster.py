"""What the scheduler needs of Kubernetes: pods that wait, agents' addresses, and binding."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kubernetes import client, config, watch
from urllib3.exceptions import HTTPError

from mig_agent.client import Pod, addresses_by_node, devices_of, pod_resources

NAME = os.environ.get("SCHEDULER_NAME", "mig-agent-scheduler")
"""What pods write into `schedulerName`."""
NAMESPACE, SERVICE = os.environ.get("AGENT_NAMESPACE", "mig-agent"), os.environ.get("AGENT_SERVICE", "mig-agent")
"""Of the headless Service over the agents."""
AGENTS_NAME = f"{SERVICE}.{NAMESPACE}.svc"
"""The name in the agents' certificates."""
ANNOTATION, JOB = "mig-agent.io/visible-devices", "batch.kubernetes.io/job-name"
_WAITING = f"spec.schedulerName={NAME},spec.nodeName="
_CLEAR = {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY}
"""Answers to a binding after which it has not happened, and will not."""

Json = dict[str, Any]


class ApiError(Exception):
    """The API server said no."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Rejected(Exception):  # noqa: N818 -- what became of a pod
    """The pod was not bound to that node, and that is certain. `for_good`: nobody else can bind it there any more."""

    def __init__(self, words: str, *, for_good: bool) -> None:
        super().__init__(words)
        self.for_good = for_good


LOST = (ApiError, HTTPError)
"""What calls raise; HTTPError where nobody answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Pod):
    """A pod that waits for a node."""

    resources: dict[str, int]
    """Of the agents', what it asks for."""
    devices: list[str]
    """The same as the agents name it: profiles (`1g.10gb`) and amounts of memory (`5G`)."""
    by_environment: bool
    """It takes its device from the annotation, and not from the kubelet."""
    node: str
    """Empty while it waits."""
    labels: dict[str, str]
    annotations: dict[str, str]
    told: str
    """What `tell` said last."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Cluster:
    """The API server, as the service account of this pod or the user of a kubeconfig. Belongs to one event loop."""

    def __init__(self) -> None:
        config.load_config()
        self._core, self._discovery = client.CoreV1Api(), client.DiscoveryV1Api()
        self._changed, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._nodes: dict[str, Json] = {}

    def watch(self) -> None:
        """From now on `change` knows when pods that wait have changed."""
        threading.Thread(target=self._watch, daemon=True).start()

    async def change(self, seconds: float) -> None:
        """Wait until a waiting pod has changed since the last call, `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def waiting(self) -> list[Waiting]:
        """Return the pods of this scheduler without a node, the highest priority first. Reads the nodes, too."""
        pods = (await _call(self._core.list_pod_for_all_namespaces, field_selector=_WAITING))["items"]
        pods.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["creationTimestamp"]))
        if pods:
            await self.see_nodes()
        free = (pod for pod in pods if "deletionTimestamp" not in pod["metadata"])
        return [read(pod) for pod in free if not pod["spec"].get("schedulingGates")]

    async def see_nodes(self) -> None:
        """Read the nodes, for `objection`."""
        self._nodes = {node["metadata"]["name"]: node for node in (await _call(self._core.list_node))["items"]}

    async def pod(self, namespace: str, name: str) -> Waiting | None:
        """As it is now; None: there is none of that name."""
        try:
            return read(await _call(self._core.read_namespaced_pod, name, namespace))
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None

    def objection(self, node: str, pod: Waiting) -> str:
        """Why a node would not have it, whatever its agent says; "" where it would, as far as is known."""
        return _objection(self._nodes[node], pod) if node in self._nodes else "there is no such node"

    async def bound(self, namespace: str, job: str) -> int:
        """How many pods of a Job have a node, and have not ended."""
        pods = await _call(self._core.list_namespaced_pod, namespace, label_selector=f"{JOB}={job}")
        going_on = (pod for pod in pods["items"] if pod["status"].get("phase") not in {"Succeeded", "Failed"})
        return sum("nodeName" in pod["spec"] for pod in going_on)

    async def agents(self) -> dict[str, str]:
        """Return the addresses of the ready agents by node, from the EndpointSlices of their Service."""
        label = f"kubernetes.io/service-name={SERVICE}"
        slices = await _call(self._discovery.list_namespaced_endpoint_slice, NAMESPACE, label_selector=label)
        return addresses_by_node(slices["items"])

    async def bind(self, pod: Waiting, node: str, uuids: list[str]) -> None:
        """Write annotation and node at once. Raises Rejected; after any other error the pod may be bound or not."""
        # Once more, and only now: a kubelet fails for good a pod that comes while it has no devices to give.
        if words := _objection(await _call(self._core.read_node, node), pod):
            raise Rejected(f"{node}: {words}", for_good=False)
        annotations = {ANNOTATION: ",".join(uuids)}
        meta = {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid, "annotations": annotations}
        body = {"metadata": meta, "target": {"kind": "Node", "name": node}}
        try:
            await _call(self._core.create_namespaced_pod_binding, pod.name, pod.namespace, body)
        except ApiError as error:
            if error.status not in _CLEAR:
                raise
            now = await self.pod(pod.namespace, pod.name)
            where = now.node if now and now.uid == pod.uid else "nowhere, as it is gone"
            if where != node:  # else an earlier call has done it, whose answer was lost
                raise Rejected(f"{node}: {error}", for_good=bool(where)) from error

    async def tell(self, pod: Waiting, reason: str, words: str) -> None:
        """Why it waits, where `kubectl` and autoscalers look for it: in its condition PodScheduled."""
        if pod.told != words:
            condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": words}
            body = {"status": {"conditions": [condition]}}
            with contextlib.suppress(*LOST):  # it is gone, most likely
                await _call(self._core.patch_namespaced_pod_status, pod.name, pod.namespace, body)

    def _watch(self) -> None:
        """In a thread. It only wakes: what there is, is asked for."""
        pods = self._core.list_pod_for_all_namespaces
        while True:
            with contextlib.suppress(client.ApiException, HTTPError):
                for _ in watch.Watch().stream(pods, field_selector=_WAITING, timeout_seconds=300):
                    self._loop.call_soon_threadsafe(self._changed.set)
            time.sleep(1)


def read(pod: Json) -> Waiting:
    """Return a pod from its JSON."""
    meta, conditions = pod["metadata"], pod["status"].get("conditions", [])
    resources = pod_resources(pod["spec"])
    return Waiting(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resources=resources,
        devices=devices_of(resources),
        by_environment=f"metadata.annotations['{ANNOTATION}']" in json.dumps(pod["spec"]),
        node=pod["spec"].get("nodeName", ""),
        labels=meta.get("labels", {}),
        annotations=meta.get("annotations", {}),
        told=next((each.get("message", "") for each in conditions if each["type"] == "PodScheduled"), ""),
    )


def _objection(node: Json, pod: Waiting) -> str:
    if node["spec"].get("unschedulable"):
        return "the node is cordoned"
    # A node without a device plugin may show no numbers at all; then nothing can be said by them.
    there = (pod.resources if pod.by_environment else {}) | node["status"].get("allocatable", {})
    short = [name for name, count in pod.resources.items() if int(there.get(name, 0)) < count]
    return f"the node shows no {' and '.join(short)}" if short else ""


async def _call(method: Callable[..., Any], *arguments: object, **more: object) -> Json:
    """In a thread. Raises ApiError where the API server says no, HTTPError where it says nothing."""
    try:
        answer = await asyncio.to_thread(method, *arguments, _preload_content=False, _request_timeout=30, **more)
    except client.ApiException as error:
        raise ApiError(error.status, f"the API server says: {_words(error)}") from error
    found: Json = json.loads(answer.data)
    return found


def _words(error: client.ApiException) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(error.body)["message"])
    return f"{error.status} {error.reason}"
