"""Which pod has which of our devices, from what the kubelet tells. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mig_agent.adapters.kubelet import CheckpointEntry, ListedPod
from mig_agent.core.model import KubeletDevice, Lease, LeaseId, NodeView, Pod, live_devices
from mig_agent.frontends.deviceplugin.ids import is_ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A container that starts, its pod, and all that the pod was given of ours."""

    pod: Pod
    """Without a name where only the kubelet's checkpoint knows it, as for a plain init container."""
    container: str
    container_devices: tuple[KubeletDevice, ...]
    """Those that are asked for, and then what else the container was given."""
    devices: tuple[KubeletDevice, ...]
    """Of all containers of the pod, each once; init containers hand theirs on."""


def claim_of(
    asked: Collection[KubeletDevice],
    listed: Iterable[ListedPod],
    recorded: Sequence[CheckpointEntry],
    resources: Collection[str],
) -> Claim | None:
    """The container that was given what is asked for; None where the kubelet tells of none.

    `resources` are the names that are served here: what else the pod has is others' business.
    """
    wanted = set(asked)
    uid = next((entry.pod_uid for entry in recorded if wanted and wanted <= set(entry.devices)), "")
    own = [entry for entry in recorded if uid and entry.pod_uid == uid]
    everything = [device for entry in own for device in entry.devices]
    # A plain init container is not listed, but what it hands on to another container is.
    pod = next((each for each in listed if wanted & set(each.devices)), None) or next(
        (each for each in listed if set(everything) & set(each.devices)), None
    )
    if pod is None and not uid:
        return None
    containers: dict[str, list[KubeletDevice]] = {}
    for entry in own:
        containers.setdefault(entry.container, []).extend(entry.devices)
    if pod is not None:
        everything += pod.devices
        containers |= {each.name: list(each.devices) for each in pod.containers}
    container = _starting(wanted, containers)
    return Claim(
        pod=Pod(namespace=pod.namespace, name=pod.name, uid=uid) if pod else Pod(namespace="", name="", uid=uid),
        container=container,
        container_devices=_served((*asked, *containers.get(container, ())), resources),
        devices=_served((*asked, *everything), resources),
    )


def holders(view: NodeView) -> Mapping[KubeletDevice, Lease]:
    """The lease that stands for each device of the kubelet's, with an instance that is there.

    A pod that got another for one that was lost has two, of which the later counts.
    """
    return {
        device: lease
        for lease in sorted(view.leases.values(), key=lambda lease: lease.created_at)
        for device, instance in zip(lease.kubelet_devices, live_devices(view, lease), strict=False)
        if instance is not None
    }


def given(view: NodeView) -> frozenset[KubeletDevice]:
    """All devices that pods have leases for, those included that are lost: the kubelet counts them as taken."""
    return frozenset(device for lease in view.leases.values() for device in lease.kubelet_devices)


def shared(devices: Iterable[KubeletDevice], listed: Sequence[ListedPod]) -> tuple[KubeletDevice, list[str]] | None:
    """The first of the devices that the kubelet gave to several pods, and their names; None where it did not."""
    for device in devices:
        names = sorted(f"{pod.namespace}/{pod.name}" for pod in listed if device in pod.devices)
        if len(names) > 1:
            return device, names
    return None


def belongs_to(lease: Lease, pod: Pod, ending: Collection[LeaseId], given_again: Collection[LeaseId] = ()) -> bool:
    """Whether a lease is this very pod's, and stays so; one that was `given_again` only where the UIDs say it."""
    holder = lease.holder.pod
    if holder is None or lease.id in ending:
        return False
    same_name = (holder.namespace, holder.name) == (pod.namespace, pod.name)
    if holder.uid and pod.uid:
        return same_name and holder.uid == pod.uid
    return same_name and lease.id not in given_again


def _starting(wanted: Collection[KubeletDevice], containers: Mapping[str, Collection[KubeletDevice]]) -> str:
    """The container for which the kubelet asks, all its devices of one resource at once; "" where it is not told.

    Of two that were given the very same ones, one hands them on to the other: the one with more is taken, since a
    variable that names too much does no harm where what is asked for stands first in it.
    """
    resources = {device.resource for device in wanted}
    exact = [
        name
        for name, devices in containers.items()
        if {device for device in devices if device.resource in resources} == set(wanted)
    ]
    return max(exact, key=lambda name: len(containers[name]), default="")


def _served(devices: Iterable[KubeletDevice], resources: Collection[str]) -> tuple[KubeletDevice, ...]:
    """Those of resources that are served, each once; another plugin may have served the name before."""
    return tuple(dict.fromkeys(each for each in devices if each.resource in resources and is_ours(each.id)))
