"""Evidence from the kubelet's list of pods on whether a pod that holds devices is still alive. Pure.

A list without the pod proves the pod's end only if the same run of the kubelet has listed the pod before: a kubelet
that has just started, or cannot reach the API server, does not know its own pods yet while their containers go on
running.
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
    """The liveness of a pod, as far as the evidence tells."""

    LIVES = auto()
    GONE = auto()
    UNSURE = auto()
    """The kubelet's list does not tell: the API server must be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One list of pods and devices from the kubelet, with look-up tables."""

    kubelet: Identity | None
    """The run of the kubelet that gave the list; None if that is not known."""
    owners: dict[KubeletDevice, frozenset[Name]]
    """The pods that have each device; several only if the kubelet has given a device to two pods."""
    names: frozenset[Name]

    @classmethod
    def of(cls, kubelet: Identity | None, pods: Sequence[ListedPod]) -> Listing:
        """Return a list with its look-up tables."""
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
    """The pods and devices of interest that the current run of the kubelet has listed so far."""

    kubelet: Identity | None = None
    names: set[Name] = field(default_factory=set)
    devices: set[tuple[Name, KubeletDevice]] = field(default_factory=set)

    def note(self, listing: Listing, matter: Iterable[tuple[Pod, Collection[KubeletDevice]]]) -> None:
        """Add a new list, and forget all except `matter`: the pods of interest, with their devices."""
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
    """Return the liveness of a pod that has these devices. `seen` must not include this listing yet."""
    name = (pod.namespace, pod.name)
    if any(_has(name, device, listing) for device in devices):
        return PodLiveness.LIVES
    if any(device in listing.owners for device in devices):
        return PodLiveness.GONE  # another pod has its device
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
    """Return the liveness of a pod by the API server's answer; None: there is no pod of its name.

    `is_listed`: the kubelet lists a pod of this name. `node` is the name of this node.
    """
    if facts is None:
        return PodLiveness.LIVES if is_listed else PodLiveness.GONE
    if facts.finished or (facts.node and facts.node != node):
        return PodLiveness.GONE
    if pod.uid and facts.uid and pod.uid not in facts.uids:
        return PodLiveness.GONE
    return PodLiveness.LIVES
