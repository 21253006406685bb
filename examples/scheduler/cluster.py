"""What the scheduler needs of Kubernetes: pods that wait, agents' addresses, and binding."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kubernetes import client, config, watch
from urllib3.exceptions import HTTPError

NAME = os.environ.get("SCHEDULER_NAME", "mig-agent-scheduler")
"""What pods write into `schedulerName`."""
NAMESPACE = os.environ.get("AGENT_NAMESPACE", "mig-agent")
SERVICE = os.environ.get("AGENT_SERVICE", "mig-agent")
"""The headless Service over the agents."""
AGENTS_NAME = f"{SERVICE}.{NAMESPACE}.svc"
"""The name in the agents' certificates."""
PROFILE, MEMORY = "nvidia.com/mig-", "mig-agent.io/memory-"
"""How the names of their resources begin."""
JOB = "batch.kubernetes.io/job-name"
"""The label by which a Job marks its pods."""
ANNOTATION = "mig-agent.io/visible-devices"
_WAITING = f"spec.schedulerName={NAME},spec.nodeName="

Json = dict[str, Any]


class ApiError(Exception):
    """The API server said no."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Rejected(Exception):  # noqa: N818 -- what became of a pod
    """The pod will not be bound to that node, and that is certain; the words say why."""


LOST = (ApiError, HTTPError)
"""What calls raise; HTTPError where nobody answers."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pod that waits for a node."""

    namespace: str
    name: str
    uid: str
    """The next pod of the same name has another."""
    resources: Counter[str]
    """Of the agents', what it asks for."""
    devices: list[str]
    """The same as the agents name it: profiles (`1g.10gb`) and amounts of memory (`5G`)."""
    by_environment: bool
    """It takes its device from the annotation, and not from the kubelet."""
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
        threading.Thread(target=self._watch, daemon=True).start()

    async def change(self, seconds: float) -> None:
        """Returns when a pod that waits has changed since the last time, or so many seconds later."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    async def waiting(self) -> list[Waiting]:
        """The pods of this scheduler that have no node. Where there are any, looks at the nodes as well."""
        pods = (await _call(self._core.list_pod_for_all_namespaces, field_selector=_WAITING))["items"]
        free = [
            pod
            for pod in pods
            if not pod["metadata"].get("deletionTimestamp") and not pod["spec"].get("schedulingGates")
        ]
        free.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["creationTimestamp"]))
        if free:
            nodes = (await _call(self._core.list_node))["items"]
            self._nodes = {node["metadata"]["name"]: node for node in nodes}
        return [_read(pod) for pod in free]

    def objection(self, node: str, pod: Waiting) -> str:
        """Why a node would not have it, whatever its agent says; "" where it would, as far as is known."""
        return _objection(self._nodes[node], pod) if node in self._nodes else "there is no such node"

    async def bound(self, namespace: str, job: str) -> int:
        """How many pods of a Job have a node, and have not ended."""
        pods = await _call(self._core.list_namespaced_pod, namespace, label_selector=f"{JOB}={job}")
        going_on = (pod for pod in pods["items"] if pod["status"].get("phase") not in {"Succeeded", "Failed"})
        return sum("nodeName" in pod["spec"] for pod in going_on)

    async def agents(self) -> dict[str, str]:
        """The addresses of the agents that are ready, by node: from the EndpointSlices of their Service."""
        label = f"kubernetes.io/service-name={SERVICE}"
        slices = await _call(self._discovery.list_namespaced_endpoint_slice, NAMESPACE, label_selector=label)
        return {
            endpoint["nodeName"]: f"{_host(endpoint['addresses'][0])}:{port['port']}"
            for piece in slices["items"]
            for port in piece.get("ports") or []
            for endpoint in piece.get("endpoints") or []
            if port.get("name") == "grpc" and endpoint.get("conditions", {}).get("ready", True)
        }

    async def bind(self, pod: Waiting, node: str, uuids: list[str]) -> None:
        """Annotation and node are written at once. Raises Rejected; anything else that is raised leaves it open."""
        meta = {
            "name": pod.name,
            "namespace": pod.namespace,
            "uid": pod.uid,
            "annotations": {ANNOTATION: ",".join(uuids)},
        }
        body = {"metadata": meta, "target": {"kind": "Node", "name": node}}
        # Once more, and only now: a kubelet fails for good a pod that comes while it has no devices to give.
        if words := _objection(await _call(self._core.read_node, node), pod):
            raise Rejected(f"{node}: {words}")
        try:
            await _call(self._core.create_namespaced_pod_binding, pod.name, pod.namespace, body)
        except ApiError as error:
            clear = {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY}
            if error.status not in clear:
                raise
            if await self._node_of(pod) != node:  # it is there where an earlier call was not answered
                raise Rejected(str(error)) from error

    async def tell(self, pod: Waiting, words: str) -> None:
        """Why it waits, where `kubectl` and autoscalers look for it: in its condition PodScheduled."""
        if pod.told != words:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
            body = {"status": {"conditions": [condition]}}
            with contextlib.suppress(ApiError):  # it is gone, most likely
                await _call(self._core.patch_namespaced_pod_status, pod.name, pod.namespace, body)

    async def _node_of(self, pod: Waiting) -> str:
        """Where this very pod is; "" where it is nowhere."""
        try:
            now = await _call(self._core.read_namespaced_pod, pod.name, pod.namespace)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return ""
            raise
        return str(now["spec"].get("nodeName", "")) if now["metadata"]["uid"] == pod.uid else ""

    def _watch(self) -> None:
        """In a thread. It only wakes: what there is, is asked for."""
        pods = self._core.list_pod_for_all_namespaces
        while True:
            with contextlib.suppress(client.ApiException, HTTPError):
                for _ in watch.Watch().stream(pods, field_selector=_WAITING, timeout_seconds=300):
                    self._loop.call_soon_threadsafe(self._changed.set)
            time.sleep(1)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _read(pod: Json) -> Waiting:
    meta, conditions = pod["metadata"], pod["status"].get("conditions", [])
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        total += _resources(container)
    for container in pod["spec"].get("initContainers", []):
        total |= _resources(container)  # they run before, one after the other, and hand theirs on
    return Waiting(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resources=total,
        devices=sorted(map(_device, total.elements())),
        by_environment=f"metadata.annotations['{ANNOTATION}']" in json.dumps(pod["spec"]["containers"]),
        labels=meta.get("labels", {}),
        annotations=meta.get("annotations", {}),
        told=next((each.get("message", "") for each in conditions if each["type"] == "PodScheduled"), ""),
    )


def _objection(node: Json, pod: Waiting) -> str:
    if node["spec"].get("unschedulable"):
        return "the node is cordoned"
    there = node["status"].get("allocatable", {})
    # A node without a device plugin may show no numbers at all; then nothing can be said by them.
    otherwise = pod.resources.total() if pod.by_environment else 0
    short = [name for name, count in pod.resources.items() if int(there.get(name, otherwise)) < count]
    return f"the node shows no {' and '.join(short)}" if short else ""


def _resources(container: Json) -> Counter[str]:
    limits = container.get("resources", {}).get("limits", {})
    return Counter({name: int(count) for name, count in limits.items() if name.startswith((PROFILE, MEMORY))})


def _device(resource: str) -> str:
    """`nvidia.com/mig-1g.10gb.me` is `1g.10gb+me`, `mig-agent.io/memory-5g` is `5G`."""
    if resource.startswith(PROFILE):
        return resource.removeprefix(PROFILE).replace(".me", "+me")
    return resource.removeprefix(MEMORY).upper()


async def _call(method: Callable[..., Any], *arguments: object, **more: object) -> Json:
    """In a thread. Raises ApiError where the API server says no, HTTPError where it says nothing."""
    try:
        answer = await asyncio.to_thread(method, *arguments, _preload_content=False, _request_timeout=30, **more)
    except client.ApiException as error:
        raise ApiError(error.status, f"the API server says: {error.status} {error.reason}") from error
    found: Json = json.loads(answer.data)
    return found
