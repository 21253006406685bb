"""The bodies of what the agent changes at the API server; pure.

All are written so that nothing else in the object is touched, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mig_agent.adapters.kubeapi.objects import NodeCondition

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"

Patch = dict[str, Any] | list[dict[str, Any]]


def resources_patch(counts: Mapping[str, int], capacity: Mapping[str, int] = MappingProxyType({})) -> Patch:
    """A JSON patch that sets how many of each resource the node gives, and how many it has; for nodes/NAME/status.

    It has as many as it gives where `capacity` says nothing else. `add` sets a member whether it is there or not. The
    kubelet always writes both maps, so they are there.
    """
    return [
        {"op": "add", "path": f"/status/{part}/{pointer(name)}", "value": str(number)}
        for name, count in sorted(counts.items())
        for part, number in (("capacity", capacity.get(name, count)), ("allocatable", count))
    ]


def owned_patch(counts: Mapping[str, int | None], annotations: Mapping[str, str | None]) -> Patch:
    """A merge patch of resources of the node's status, and of annotations that say whose they are, in one write.

    None takes one away. A node has as many of each as it gives: the kubelet makes that so for those that no device
    plugin serves.
    """
    numbers = {name: None if count is None else str(count) for name, count in sorted(counts.items())}
    patch: dict[str, Any] = {"metadata": {"annotations": dict(annotations)}} if annotations else {}
    return patch | ({"status": {"capacity": numbers, "allocatable": numbers}} if numbers else {})


def metadata_patch(labels: Mapping[str, str | None], annotations: Mapping[str, str | None]) -> Patch:
    """A merge patch of labels and annotations; None takes one away."""
    parts = {"labels": dict(labels), "annotations": dict(annotations)}
    return {"metadata": {name: part for name, part in parts.items() if part}}


def condition_patch(condition: NodeCondition, now: str, *, changed: bool) -> Patch:
    """A strategic merge patch that sets one condition, for nodes/NAME/status.

    `now` is RFC 3339. The moment of its last transition moves only where its status has changed; left out, it stays.
    """
    entry = {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastHeartbeatTime": now,
    }
    if changed:
        entry["lastTransitionTime"] = now
    return {"status": {"conditions": [entry]}}


def condition_removal_patch(kind: str) -> Patch:
    """A strategic merge patch that takes a condition away; it may be repeated."""
    return {"status": {"conditions": [{"$patch": "delete", "type": kind}]}}


def pointer(name: str) -> str:
    """A name as one step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
