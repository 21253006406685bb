"""The facts that the agent needs from Kubernetes objects, read from their JSON; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mig_agent.core.errors import MigAgentError
from mig_agent.core.pod_resources import requested

NO_ANSWER = 0
"""Status of an error without an HTTP status: not reached, too late, or not understood."""
_NOT_FOUND = 404
_TOO_MANY = 429
_SERVER_ERRORS = 500
_READY = "Ready"
"""The node condition that the kubelet itself maintains."""
_MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a mirror pod: the UID that the kubelet gave the static pod when it read the pod's file."""

Json = Mapping[str, Any]
"""A JSON object as `json.loads` returns it."""
PodName = tuple[str, str]
"""Namespace and name."""


class KubeApiError(MigAgentError):
    """The API server did not do what was asked; the message starts with "cannot"."""

    def __init__(self, words: str, status: int = NO_ANSWER) -> None:
        super().__init__(words)
        self.words = words
        self.status = status
        """The HTTP status, or NO_ANSWER."""

    @property
    def retryable(self) -> bool:
        """True if the same call may succeed soon."""
        return self.status in {NO_ANSWER, _TOO_MANY} or self.status >= _SERVER_ERRORS

    @property
    def not_found(self) -> bool:
        """True if the object does not exist."""
        return self.status == _NOT_FOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """A pod as the API server reports it."""

    namespace: str
    name: str
    uid: str
    phase: str
    """`Pending`, `Running`, `Succeeded`, `Failed`, `Unknown`."""
    priority: int = 0
    deleting: bool = False
    """True if the pod has a deletion timestamp; its containers may still run."""
    node: str = ""
    daemon_set: str = ""
    """Name of the DaemonSet that owns the pod; empty if none does."""

    static_uid: str = ""
    """UID by which the kubelet knows a static pod, if this is its mirror pod; empty otherwise."""

    resources: Mapping[str, int] = field(default_factory=dict)
    """Count of each extended resource that the pod requests, as the scheduler counts it."""

    claims: tuple[str, ...] = ()
    """Names of the ResourceClaims that the pod uses, generated ones included."""

    @property
    def uids(self) -> frozenset[str]:
        """All UIDs by which the pod may be known."""
        return frozenset({self.uid, self.static_uid} - {""})

    @property
    def finished(self) -> bool:
        """True if no container of the pod will run again."""
        return self.phase in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    """A device in the allocation of a claim."""

    request: str
    """The request of the claim that the device is for, without a subrequest."""
    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFacts:
    """A ResourceClaim as the API server reports it."""

    namespace: str
    name: str
    uid: str
    devices: tuple[AllocatedDevice, ...] = ()
    """The allocated devices of all drivers; empty while the claim is not allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """One condition of a node's status. For types that name a problem, `status` `False` means that all is well."""

    type: str
    status: str
    """`True`, `False` or `Unknown`."""
    reason: str = ""
    """One word in CamelCase."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node as the API server reports it."""

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)
    """By resource name, as Kubernetes writes quantities: `7`, `8`, `32Gi`."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, NodeCondition] = field(default_factory=dict)
    """By type of condition."""
    """`v1.36.2`."""
    heartbeat: str = ""
    """When the kubelet last wrote the node's status: `2026-11-21T20:15:02Z`."""
    resource_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSetFacts:
    """A DaemonSet as the API server reports it."""

    uid: str
    deleting: bool
    pod_spec: Json = field(default_factory=dict)
    """Spec of the pods that it creates."""


def pod_facts(pod: Json) -> PodFacts:
    """Return the facts of a pod from its JSON. Raises KeyError if it is not a pod."""
    meta, status = pod["metadata"], pod.get("status") or {}
    spec: Any = pod.get("spec") or {}
    return PodFacts(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        phase=status.get("phase", "Unknown"),
        priority=spec.get("priority") or 0,
        deleting="deletionTimestamp" in meta,
        node=spec.get("nodeName", ""),
        static_uid=(meta.get("annotations") or {}).get(_MIRROR, ""),
        resources=requested(spec),
        claims=_claims(spec, status),
        daemon_set=next((each["name"] for each in meta.get("ownerReferences") or () if _is_daemon_set(each)), ""),
    )


def node_facts(node: Json) -> NodeFacts:
    """Return the facts of a node from its JSON. Raises KeyError if it is not a node."""
    meta, status = node["metadata"], node.get("status") or {}
    return NodeFacts(
        name=meta["name"],
        uid=meta["uid"],
        labels=dict(meta.get("labels") or {}),
        annotations=dict(meta.get("annotations") or {}),
        capacity=dict(status.get("capacity") or {}),
        allocatable=dict(status.get("allocatable") or {}),
        conditions={each["type"]: _condition(each) for each in status.get("conditions") or ()},
        heartbeat=next(
            (each.get("lastHeartbeatTime") or "" for each in status.get("conditions") or () if each["type"] == _READY),
            "",
        ),
        resource_version=meta.get("resourceVersion", ""),
    )


def claim_facts(claim: Json) -> ClaimFacts:
    """Return the facts of a ResourceClaim from its JSON. Raises KeyError if it is not one."""
    meta, allocation = claim["metadata"], (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    return ClaimFacts(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        devices=tuple(
            AllocatedDevice(
                request=each["request"].partition("/")[0],
                driver=each["driver"],
                pool=each["pool"],
                device=each["device"],
            )
            for each in results
        ),
    )


def _claims(spec: Json, status: Json) -> tuple[str, ...]:
    """Return the names of the claims that a pod uses; a claim that is still to be generated has none."""
    named = [each.get("resourceClaimName") for each in spec.get("resourceClaims") or ()]
    named += [each.get("resourceClaimName") for each in status.get("resourceClaimStatuses") or ()]
    named.append((status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName"))
    return tuple(dict.fromkeys(each for each in named if each))


def daemon_set_facts(daemon_set: Json) -> DaemonSetFacts:
    """Return the facts of a DaemonSet from its JSON. Raises KeyError if it is not a DaemonSet."""
    meta, template = daemon_set["metadata"], (daemon_set.get("spec") or {}).get("template") or {}
    return DaemonSetFacts(uid=meta["uid"], deleting="deletionTimestamp" in meta, pod_spec=template.get("spec") or {})


def _condition(each: Json) -> NodeCondition:
    return NodeCondition(
        type=each["type"],
        status=each.get("status", "Unknown"),
        reason=each.get("reason", ""),
        message=each.get("message", ""),
    )


def _is_daemon_set(reference: Json) -> bool:
    return bool(reference.get("controller")) and reference.get("kind") == "DaemonSet"
