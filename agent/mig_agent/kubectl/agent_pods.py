"""The agents' pods of a cluster: which node each serves, and why one cannot be asked; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mig_agent.client.to_json import Json

CONTAINER = "agent"
_SILENT_REASONS = {"ContainerCreating", "PodInitializing"}
"""Reasons that need no message of the kubelet's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPod:
    """The pod of a node's agent."""

    node: str
    """Name of the node; empty if the pod is bound to none and names none."""
    name: str
    trouble: str = ""
    """Why the agent in it cannot be asked; empty if it can."""

    @property
    def label(self) -> str:
        """The name of the node, or of the pod where no node is known."""
        return self.node or self.name

    @property
    def keys(self) -> Mapping[str, Json]:
        """Return its keys in JSON."""
        return {"node": self.node, "pod": self.name}


def agent_pods(pods: Iterable[Mapping[str, Any]]) -> tuple[AgentPod, ...]:
    """Return one pod for each node, by the node's name.

    A node has two while a pod is replaced: one that can be asked comes first, and then the newest.
    """
    by_node: dict[str, AgentPod] = {}
    for each in sorted(pods, key=_created):
        pod = AgentPod(node=_node(each), name=str(each["metadata"]["name"]), trouble=_trouble(each))
        before = by_node.get(pod.node)
        if before is None or before.trouble or not pod.trouble:
            by_node[pod.node] = pod
    return tuple(by_node[node] for node in sorted(by_node))


def _created(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))


def _node(pod: Mapping[str, Any]) -> str:
    """Return the node of a pod: where it is bound, else where its DaemonSet wants it."""
    spec = pod.get("spec") or {}
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    for each in (field for term in terms for field in term.get("matchFields") or ()):
        if each.get("key") == "metadata.name" and len(each.get("values") or ()) == 1:
            return str(each["values"][0])
    return ""


def _trouble(pod: Mapping[str, Any]) -> str:
    """Return why a pod cannot be asked: `its agent's pod is Pending (ImagePullBackOff: ...)`; empty if it can."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return "its agent's pod is being deleted"
    if status.get("phase") == "Running" and _container(status).get("running") is not None:
        return ""
    why = _waits_for(status)
    return f"its agent's pod is {status.get('phase') or 'Unknown'}" + (f" ({why})" if why else "")


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the agent's container."""
    states = [each.get("state") or {} for each in status.get("containerStatuses") or () if each["name"] == CONTAINER]
    return states[0] if states else {}


def _waits_for(status: Mapping[str, Any]) -> str:
    state = _container(status)
    for each in (state.get("waiting"), state.get("terminated")):
        if each is not None:
            reason, message = str(each.get("reason", "")), str(each.get("message", "")).strip()
            return reason if not message or reason in _SILENT_REASONS else f"{reason}: {message}"
    for each in status.get("conditions") or ():
        if each.get("status") == "False" and each.get("message"):
            return str(each["message"])
    return str(status.get("message") or status.get("reason") or "")
