"""Device allocations of the kubelet: which are pending, which pod has which devices, and which lease serves each."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mig_agent.adapters.kubelet import CheckpointEntry, ListedPod
from mig_agent.core.errors import Refusal
from mig_agent.core.model import Lease, LeaseId, NodeView, Request, RequestKey, live_devices
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner
from mig_agent.engine.results import Granted
from mig_agent.frontends.kubernetes.owners import devices_of, leases_of_pods, pod_owner
from mig_agent.frontends.kubernetes.resources import is_agent_id

PENDING_SECONDS = 10.0
"""From Allocate until the kubelet surely lists the pod, if it took it."""
HIDDEN_SECONDS = 300.0
"""The same for a plain init container, which it never lists: its image may have to be pulled first."""


@dataclass(slots=True, eq=False, kw_only=True)
class Acquisition:
    """A request of a pod on its way through the manager; it outlives the calls that wait for it."""

    owner: PodOwner
    request: Request
    since: float
    task: asyncio.Task[Granted | Refusal]
    """Its outcome; it fails only for what was not expected."""
    told: bool = False
    """Whether the pod's events say that it waits."""

    @property
    def pod(self) -> Pod:
        """The pod that waits."""
        return self.owner.pod


@dataclass(slots=True)
class AllocationTable:
    """Holds the allocations of the kubelet. Not thread-safe; use from the event loop."""

    on_way: dict[KubeletDevice, float] = field(default_factory=dict)
    """Allocated, and not seen on a pod yet, with the moment of the allocation."""
    giving: int = 0
    """Calls of Allocate that are not answered yet. The kubelet must not be asked for its pods meanwhile: if one of them
    has ended it then forgets what it is giving away, and gives it to another pod as well (seen with 1.36.3)."""
    listed: frozenset[KubeletDevice] = frozenset()
    """What the kubelet's last list shows on pods, of any plugin."""
    acquisitions: dict[KubeletDevice, Acquisition] = field(default_factory=dict)
    """By each of its devices."""
    requests: dict[RequestKey, tuple[KubeletDevice, ...]] = field(default_factory=dict)
    """What is asked for now; each device is counted either by its place on a GPU or as wanted, never twice."""
    hopeless: frozenset[KubeletDevice] = frozenset()
    """Of pods that this node could never serve, even empty: nothing is kept free for them."""
    given_again: dict[KubeletDevice, LeaseId] = field(default_factory=dict)
    """Devices that the kubelet gave away once more, and whose they were. That the former pod is gone is likely then
    and no proof: see `giving`; others ask the kubelet, too."""
    ending: dict[LeaseId, str] = field(default_factory=dict)
    """Leases whose end is certain and not recorded yet, with its reason in words."""

    def allocated(self, leased: Collection[KubeletDevice], resource: str) -> frozenset[str]:
        """The ids of a resource that the kubelet counts as taken, as far as can be known."""
        everything = (self.listed, self.on_way, leased, self.acquisitions)
        return frozenset(each.id for part in everything for each in part if each.resource == resource)

    def under_way(self) -> tuple[Acquisition, ...]:
        """All acquisitions, each once."""
        return tuple(dict.fromkeys(self.acquisitions.values()))

    def forget(self, acquisition: Acquisition) -> None:
        """It has come to its end."""
        for device in acquisition.owner.devices:
            if self.acquisitions.get(device) is acquisition:
                del self.acquisitions[device]
        self.requests.pop(acquisition.request.key, None)

    def ended(self, lease: LeaseId) -> None:
        """A lease has ended."""
        self.ending.pop(lease, None)
        self.given_again = {device: former for device, former in self.given_again.items() if former != lease}

    def noted(self, listed: frozenset[KubeletDevice], asked_at: float, recorded: Collection[KubeletDevice]) -> None:
        """The kubelet's list as it was at some moment after `asked_at`; `recorded` is what its checkpoint holds."""
        self.listed = listed
        self.hopeless &= listed
        self.on_way = {
            device: at
            for device, at in self.on_way.items()
            if device not in listed and asked_at < at + (HIDDEN_SECONDS if device in recorded else PENDING_SECONDS)
        }


def unserved(
    book: AllocationTable,
    leased: Mapping[KubeletDevice, Lease],
    placed: Collection[KubeletDevice],
    resources: Collection[str],
) -> tuple[KubeletDevice, ...]:
    """What the kubelet has allocated and nothing stands for yet: for these room is needed before all others.

    But for what another plugin gave that served the name before.

    `placed` are devices whose plans are being carried out.
    """
    taken = {device for part in (book.listed, book.on_way, book.acquisitions) for device in part}
    return tuple(
        sorted(
            (
                device
                for device in taken
                if device.resource in resources
                and is_agent_id(device.id)
                and device not in leased
                and device not in placed
                and device not in book.hopeless
            ),
            key=lambda device: (device.resource, device.id),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDevices:
    """A container that starts, its pod, and all that the pod was given of ours."""

    pod: Pod
    """Without a name where only the kubelet's checkpoint knows it, as for a plain init container."""
    container: str
    container_devices: tuple[KubeletDevice, ...]
    """Those that are asked for, and then what else the container was given."""
    devices: tuple[KubeletDevice, ...]
    """Of all containers of the pod, each once; init containers hand theirs on."""


def container_devices(
    asked: Collection[KubeletDevice],
    listed: Iterable[ListedPod],
    recorded: Sequence[CheckpointEntry],
    resources: Collection[str],
) -> ContainerDevices | None:
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
    return ContainerDevices(
        pod=Pod(namespace=pod.namespace, name=pod.name, uid=uid) if pod else Pod(namespace="", name="", uid=uid),
        container=container,
        container_devices=_served((*asked, *containers.get(container, ())), resources),
        devices=_served((*asked, *everything), resources),
    )


def lease_by_device(view: NodeView) -> Mapping[KubeletDevice, Lease]:
    """The lease that stands for each device of the kubelet's, with an instance that is there.

    A pod that got another for one that was lost has two, of which the later counts.
    """
    return {
        device: lease
        for lease in sorted(view.leases.values(), key=lambda lease: lease.created_at)
        for device, instance in zip(devices_of(lease), live_devices(view, lease), strict=False)
        if instance is not None
    }


def leased_kubelet_devices(view: NodeView) -> frozenset[KubeletDevice]:
    """All devices that pods have leases for, those included that are lost: the kubelet counts them as taken."""
    return frozenset(device for _, owner in leases_of_pods(view) for device in owner.devices)


def first_shared(
    devices: Iterable[KubeletDevice], listed: Sequence[ListedPod]
) -> tuple[KubeletDevice, list[str]] | None:
    """The first of the devices that the kubelet gave to several pods, and their names; None where it did not."""
    for device in devices:
        names = sorted(f"{pod.namespace}/{pod.name}" for pod in listed if device in pod.devices)
        if len(names) > 1:
            return device, names
    return None


def belongs_to(lease: Lease, pod: Pod, ending: Collection[LeaseId], given_again: Collection[LeaseId] = ()) -> bool:
    """Whether a lease is this very pod's, and stays so; one that was `given_again` only where the UIDs say it."""
    owner = pod_owner(lease)
    if owner is None or lease.id in ending:
        return False
    holder = owner.pod
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
    return tuple(dict.fromkeys(each for each in devices if each.resource in resources and is_agent_id(each.id)))
