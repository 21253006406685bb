"""Pods as the API server's JSON: how they are asked for, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from support.cluster.api import Json
from support.cluster.images import BUSYBOX

PROFILE = "nvidia.com/mig-"
MEMORY = "mig-agent.io/memory-"
ALL_TOLD = "-- that is all"
TELL = f"env; echo '{ALL_TOLD}'"
"""A container's own view, with a last line: a log may be read before it is whole."""
_STAY = f'trap "exit 0" TERM; {TELL}; sleep 1000000 & wait'
"""Tells what it sees, stays, and goes at once when it is told to."""


def container(
    name: str = "main", limits: Mapping[str, int] | None = None, *, script: str = _STAY, **more: object
) -> Json:
    """With `limits` of extended resources, which are requests as well."""
    return {
        "name": name,
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "resources": {"limits": {resource: str(count) for resource, count in (limits or {}).items()}},
        **more,
    }


def pod(name: str, containers: Sequence[Json], **spec: object) -> Json:
    """That is not started again, unless `spec` says so."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": pod_spec(containers, **{"restartPolicy": "Never", **spec}),
    }


def pod_spec(containers: Sequence[Json], **spec: object) -> Json:
    return {
        "containers": list(containers),
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **spec,
    }


def deployment(name: str, replicas: int, limits: Mapping[str, int]) -> Json:
    return _controller("Deployment", name, replicas, limits)


def stateful_set(name: str, replicas: int, limits: Mapping[str, int]) -> Json:
    return _controller("StatefulSet", name, replicas, limits)


def _controller(kind: str, name: str, replicas: int, limits: Mapping[str, int]) -> Json:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod_spec([container(limits=limits)])},
        },
    }


def phase(found: Json) -> str:
    answer: str = found["status"].get("phase", "")
    return answer


def is_running(found: Json) -> bool:
    """All of its containers are."""
    statuses: list[Json] = found["status"].get("containerStatuses", [])
    return (
        phase(found) == "Running"
        and len(statuses) == len(found["spec"]["containers"])
        and all("running" in each["state"] for each in statuses)
    )


def condition(found: Json, kind: str) -> Json:
    """One condition of a pod or a node; empty where it does not have it."""
    conditions: list[Json] = found["status"].get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def has_failed(found: Json) -> bool:
    """By itself, or because the kubelet did not take it; not one that was told to go and had to be killed."""
    return phase(found) == "Failed" and (
        "deletionTimestamp" not in found["metadata"] or not found["status"].get("containerStatuses")
    )


def is_unschedulable(found: Json) -> bool:
    """The scheduler has looked at it, and no node has what it asks for."""
    return condition(found, "PodScheduled").get("reason") == "Unschedulable"


def is_bound(found: Json) -> bool:
    return bool(found["spec"].get("nodeName"))


def is_held_up(found: Json) -> bool:
    """A container of it could not start, and the kubelet will try again."""
    waiting: list[Any] = [
        each["state"].get("waiting", {}).get("reason") for each in found["status"].get("containerStatuses", [])
    ]
    return "CreateContainerConfigError" in waiting or "CreateContainerError" in waiting


def restarts(found: Json) -> int:
    """Of all of its containers."""
    return sum(each["restartCount"] for each in found["status"].get("containerStatuses", []))
