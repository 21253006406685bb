"""Whether a pod that holds devices is still there, as far as the kubelet's list can tell. Pure.

A list without a pod proves its end only where the same run of the kubelet has shown the pod before: a kubelet that has
just started, or cannot reach the API server, does not know its own pods yet while their containers go on running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from mig_agent.adapters.kubeapi import PodFacts
from mig_agent.adapters.kubelet import Identity, ListedPod
from mig_agent.core.owner import KubeletDevice, Pod

Name = tuple[str, str]
"""Namespace and name."""


class PodLiveness(Enum):
    """What has become of a pod."""

    LIVES = auto()
    GONE = auto()
    UNSURE = auto()
    """The API server has to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One answer of the kubelet."""

    kubelet: Identity | None
    """The run of the kubelet that gave it."""
    owners: dict[KubeletDevice, frozenset[Name]]
    """More than one only where the kubelet has given a device to two pods."""
    names: frozenset[Name]

    @classmethod
    def of(cls, kubelet: Identity | None, pods: Sequence[ListedPod]) -> Listing:
        """The answer with its tables."""
        owners: dict[KubeletDevice, frozenset[Name]] = {}
        for pod in pods:
            for device in pod.devices:
                owners[device] = owners.get(device, frozenset()) | {(pod.namespace, pod.name)}
        return cls(
            kubelet=kubelet,
            owners=owners,
            names=frozenset((pod.namespace, pod.name) for pod in pods),
        )


@dataclass(slots=True)
class Seen:
    """What one run of the kubelet has shown so far of the pods that matter."""

    kubelet: Identity | None = None
    names: set[Name] = field(default_factory=set)
    devices: set[tuple[Name, KubeletDevice]] = field(default_factory=set)

    def note(self, listing: Listing, matter: Iterable[tuple[Pod, Collection[KubeletDevice]]]) -> None:
        """An answer has come; pods that do not matter any more are forgotten."""
        if listing.kubelet != self.kubelet or listing.kubelet is None:
            self.names, self.devices = set(), set()
        self.kubelet = listing.kubelet
        keep = [((pod.namespace, pod.name), device) for pod, devices in matter for device in devices]
        names = {name for name, _ in keep}
        self.names = {name for name in names if name in self.names or name in listing.names}
        self.devices = {
            (name, device) for name, device in keep if (name, device) in self.devices or _has(name, device, listing)
        }


def liveness_from_kubelet(pod: Pod, devices: Collection[KubeletDevice], listing: Listing, seen: Seen) -> PodLiveness:
    """What has become of a pod that has these devices; `seen` does not know this listing yet."""
    name = (pod.namespace, pod.name)
    if any(_has(name, device, listing) for device in devices):
        return PodLiveness.LIVES
    if any(device in listing.owners for device in devices):
        return PodLiveness.GONE  # what it had is another's
    if listing.kubelet is None or listing.kubelet != seen.kubelet:
        return PodLiveness.UNSURE
    if any((name, device) in seen.devices for device in devices):
        return PodLiveness.GONE
    if name not in listing.names and name in seen.names:
        return PodLiveness.GONE
    return PodLiveness.UNSURE


def _has(name: Name, device: KubeletDevice, listing: Listing) -> bool:
    """Return whether a pod is listed with a device."""
    return name in listing.owners.get(device, frozenset())


def liveness_from_api(pod: Pod, facts: PodFacts | None, *, is_listed: bool, node: str) -> PodLiveness:
    """The same by what the API server says; `is_listed`: the kubelet lists a pod of this name."""
    if facts is None:
        return PodLiveness.LIVES if is_listed else PodLiveness.GONE
    if facts.finished or (facts.node and facts.node != node):
        return PodLiveness.GONE
    if pod.uid and facts.uid and pod.uid not in facts.uids:
        return PodLiveness.GONE
    return PodLiveness.LIVES
