"""Patch bodies for the agent's changes at the API server; pure.

Each leaves the rest of the object untouched, whoever wrote it.
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
    """Return a JSON patch for nodes/NAME/status that sets allocatable and capacity of each resource.

    The capacity equals the allocatable count where `capacity` has no entry. `add` sets a member whether or not it
    exists; the kubelet always writes both maps, so these exist.
    """
    return [
        {"op": "add", "path": f"/status/{part}/{pointer(name)}", "value": str(number)}
        for name, count in sorted(counts.items())
        for part, number in (("capacity", capacity.get(name, count)), ("allocatable", count))
    ]


def owned_patch(counts: Mapping[str, int | None], annotations: Mapping[str, str | None]) -> Patch:
    """Return a merge patch of resources in the node's status, and of the annotations that record their owner.

    None removes an entry. Capacity and allocatable are equal: the kubelet keeps them so for resources that no device
    plugin serves.
    """
    numbers = {name: None if count is None else str(count) for name, count in sorted(counts.items())}
    patch: dict[str, Any] = {"metadata": {"annotations": dict(annotations)}} if annotations else {}
    return patch | ({"status": {"capacity": numbers, "allocatable": numbers}} if numbers else {})


def metadata_patch(labels: Mapping[str, str | None], annotations: Mapping[str, str | None]) -> Patch:
    """Return a merge patch of labels and annotations; None removes one."""
    parts = {"labels": dict(labels), "annotations": dict(annotations)}
    return {"metadata": {name: part for name, part in parts.items() if part}}


def condition_patch(condition: NodeCondition, now: str, *, changed: bool) -> Patch:
    """Return a strategic merge patch for nodes/NAME/status that sets one condition.

    `now` is RFC 3339. lastTransitionTime is sent only if the status changed; the old one stays otherwise.
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
    """Return a strategic merge patch that removes a condition; sending it again does no harm."""
    return {"status": {"conditions": [{"$patch": "delete", "type": kind}]}}


def pointer(name: str) -> str:
    """Return a name as one step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
