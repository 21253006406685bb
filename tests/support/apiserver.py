"""As much of an API server as a scheduler calls: pods, bindings, EndpointSlices. The real one is in tests/e2e."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from support.webserver import Asked, Says, WebServer, json_of, web_server

Json = dict[str, Any]
RESOURCES = (
    *(f"mig-agent.io/memory-{amount}" for amount in ("5g", "10g", "20g", "40g", "80g")),
    *(f"nvidia.com/mig-{profile}" for profile in ("1g.10gb", "7g.80gb", "banana")),
)
_TICK_SECONDS = 0.1


@dataclass(slots=True)
class ApiServer:
    """What a test has of it."""

    web: WebServer
    pods: dict[str, Json] = field(default_factory=dict)
    """By name; all in the namespace `default`."""
    agents: dict[str, str] = field(default_factory=dict)
    """Where the agents that are ready listen, by node."""
    nodes: dict[str, Json] = field(default_factory=dict)
    before_binding: Callable[[Json], Says | None] = lambda _pod: None
    """May answer a binding in place of the server, or have it wait."""
    before_node: Callable[[str], None] = lambda _name: None
    """Happens when somebody asks for one node."""
    after_waiting: Callable[[], None] = lambda: None
    """Happens between the list of the pods that wait and whatever is asked next."""
    changed: threading.Event = field(default_factory=threading.Event)

    def pod(self, name: str, scheduler: str, limits: Mapping[str, int], *, gang: int = 0) -> Json:
        """A pod that waits; `gang`: one of so many pods of the Job `gang`."""
        of = (
            {"labels": {"batch.kubernetes.io/job-name": "gang"}, "annotations": {"mig-agent.io/gang-size": str(gang)}}
            if gang
            else {}
        )
        resources = {"limits": {resource: str(count) for resource, count in limits.items()}}
        made: Json = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": str(uuid.uuid4()),
                "creationTimestamp": f"2026-01-01T00:00:{len(self.pods):02}Z",
                **of,
            },
            "spec": {"schedulerName": scheduler, "containers": [{"name": "main", "resources": resources}]},
            "status": {"phase": "Pending"},
        }
        self.pods[name] = made
        self.changed.set()
        return made

    def node(self, name: str, *, cordoned: bool = False, allocatable: int = 99) -> None:
        """There from now on, or as it is from now on: it shows so many of each resource that the tests ask for."""
        self.nodes[name] = {
            "metadata": {"name": name},
            "spec": {"unschedulable": True} if cordoned else {},
            "status": {"allocatable": dict.fromkeys(RESOURCES, str(allocatable))},
        }

    def node_of(self, name: str) -> str:
        """Of a pod; "" while it is not bound."""
        return str(self.pods[name]["spec"].get("nodeName", ""))

    def why(self, name: str) -> str:
        """Why it is said to wait; "" where nothing is said."""
        conditions = self.pods[name]["status"].get("conditions", [])
        return str(conditions[0]["message"]) if conditions else ""

    def annotation(self, name: str) -> list[str]:
        """The UUIDs that were written down for it."""
        text: str = self.pods[name]["metadata"].get("annotations", {}).get("mig-agent.io/visible-devices", "")
        return text.split(",") if text else []

    def answer(self, asked: Asked) -> Says:
        """As the real one."""
        path = urlsplit(asked.path).path
        if asked.method != "GET":
            change = self._bind if path.endswith("/binding") else self._tell
            return change(path.split("/")[-2], asked.body)
        if path.endswith("/endpointslices"):
            return json_of({"items": [_slice(node, *address.split(":")) for node, address in self.agents.items()]})
        if "watch=" in asked.path:
            return Says(pieces=self._changes())
        if path.endswith("/pods"):
            # Of all namespaces those that wait are asked for, of one those of the gang.
            everywhere = path == "/api/v1/pods"
            pods = [pod for pod in self._pods() if ("nodeName" not in pod["spec"] if everywhere else _in_gang(pod))]
            answer = json_of({"items": pods})
            if everywhere:
                self.after_waiting()
            return answer
        name = path.rpartition("/")[2]
        if path == "/api/v1/nodes":
            return json_of({"items": list(self.nodes.values())})
        if path.startswith("/api/v1/nodes/"):
            self.before_node(name)
        found = (self.nodes if path.startswith("/api/v1/nodes/") else self.pods).get(name)
        return _status(404, f"there is no {name}") if found is None else json_of(found)

    def _pods(self) -> list[Json]:
        return list(self.pods.values())

    def _bind(self, name: str, binding: Json) -> Says:
        if (instead := self.before_binding(self.pods.get(name) or {})) is not None:
            return instead
        pod = self.pods.get(name)
        if pod is None:
            return _status(404, "there is no such pod")
        if pod["metadata"]["uid"] != binding["metadata"]["uid"] or "nodeName" in pod["spec"]:
            return _status(409, "it is another pod, or bound already")
        pod["metadata"].setdefault("annotations", {}).update(binding["metadata"].get("annotations", {}))
        pod["spec"]["nodeName"] = binding["target"]["name"]
        return json_of({"status": "Success"}, 201)

    def _tell(self, name: str, patch: Json) -> Says:
        pod = self.pods.get(name)
        if pod is None:
            return _status(404, "there is no such pod")
        pod["status"].update(patch["status"])  # of conditions there is one kind
        return json_of(pod)

    def _changes(self) -> Iterator[bytes]:
        while not self.web.over.is_set():
            if self.changed.wait(_TICK_SECONDS):
                self.changed.clear()
                for pod in self._pods():
                    yield json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n"


def _slice(node: str, address: str, port: str) -> Json:
    """A slice has the same port for all of its endpoints; here each agent has a port of its own, and so a slice."""
    return {
        "ports": [{"name": "grpc", "port": int(port)}],
        "endpoints": [{"nodeName": node, "addresses": [address], "conditions": {"ready": True}}],
    }


def _in_gang(pod: Json) -> bool:
    return "labels" in pod["metadata"]


def _status(code: int, words: str) -> Says:
    return json_of({"kind": "Status", "code": code, "message": words}, code)


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Runs one."""
    with web_server() as web:
        server = ApiServer(web)
        web.answer = server.answer
        yield server
