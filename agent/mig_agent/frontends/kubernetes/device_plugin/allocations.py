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
from mig_agent.frontends.kubernetes.pod_leases import devices_of, leases_of_pods, pod_owner
from mig_agent.frontends.kubernetes.resources import is_agent_id

PENDING_SECONDS = 10.0
"""How long a device is pending at most: by then the kubelet lists its pod, or has rejected it."""
HIDDEN_SECONDS = 300.0
"""The same for a plain init container, which the kubelet never lists: its image may have to be pulled first."""


@dataclass(slots=True, eq=False, kw_only=True)
class Acquisition:
    """A request of a pod that the manager has not answered yet; it outlives the calls that wait for it."""

    owner: PodOwner
    request: Request
    since: float
    """Loop time at which it was made."""
    task: asyncio.Task[Granted | Refusal]
    """Returns the outcome; raises only unexpected errors."""
    is_reported: bool = False
    """Whether an event of the pod has reported that it waits."""

    @property
    def pod(self) -> Pod:
        """The pod that waits for the devices."""
        return self.owner.pod


@dataclass(slots=True)
class AllocationTable:
    """Holds the kubelet's allocations and the pods' open requests. Not thread-safe; use from the event loop."""

    pending: dict[KubeletDevice, float] = field(default_factory=dict)
    """Devices that were allocated and are not listed with a pod yet, with the loop time of the allocation."""
    allocating: int = 0
    """Calls of Allocate in progress. The kubelet must not be asked for its pods meanwhile: if one of them has ended, it
    forgets the devices that it is allocating, and allocates them to another pod as well (seen with 1.36.3)."""
    listed: frozenset[KubeletDevice] = frozenset()
    """The devices in the kubelet's last list of pods, of any plugin."""
    acquisitions: dict[KubeletDevice, Acquisition] = field(default_factory=dict)
    """The open requests of pods, by each of their devices."""
    requests: dict[RequestKey, tuple[KubeletDevice, ...]] = field(default_factory=dict)
    """The devices of each open request; each is counted either by its slot on a GPU or as wanted, never twice."""
    unsatisfiable: frozenset[KubeletDevice] = frozenset()
    """Devices of pods that this node could never serve, even empty: nothing is reserved for them."""
    reassigned: dict[KubeletDevice, LeaseId] = field(default_factory=dict)
    """Devices that the kubelet allocated again, with their former lease. The former pod has probably ended then, but
    that is no proof: see `allocating`; other programs ask the kubelet, too."""
    ending: dict[LeaseId, str] = field(default_factory=dict)
    """Leases that must end, until that is committed, with the reason as a message."""

    def allocated(self, leased: Collection[KubeletDevice], resource: str) -> frozenset[str]:
        """Return the ids of a resource that the kubelet counts as allocated, as far as is known."""
        everything = (self.listed, self.pending, leased, self.acquisitions)
        return frozenset(each.id for part in everything for each in part if each.resource == resource)

    def open_acquisitions(self) -> tuple[Acquisition, ...]:
        """Return all open requests, each once."""
        return tuple(dict.fromkeys(self.acquisitions.values()))

    def remove(self, acquisition: Acquisition) -> None:
        """Remove a request that is finished or cancelled."""
        for device in acquisition.owner.devices:
            if self.acquisitions.get(device) is acquisition:
                del self.acquisitions[device]
        self.requests.pop(acquisition.request.key, None)

    def lease_ended(self, lease: LeaseId) -> None:
        """Remove a lease that has ended."""
        self.ending.pop(lease, None)
        self.reassigned = {device: former for device, former in self.reassigned.items() if former != lease}

    def update_listed(
        self, listed: frozenset[KubeletDevice], asked_at: float, recorded: Collection[KubeletDevice]
    ) -> None:
        """Note a list of the kubelet that is newer than `asked_at`; `recorded` are the devices in its checkpoint."""
        self.listed = listed
        self.unsatisfiable &= listed
        self.pending = {
            device: at
            for device, at in self.pending.items()
            if device not in listed and asked_at < at + (HIDDEN_SECONDS if device in recorded else PENDING_SECONDS)
        }


def unserved(
    table: AllocationTable,
    leased: Mapping[KubeletDevice, Lease],
    placed: Collection[KubeletDevice],
    resources: Collection[str],
) -> tuple[KubeletDevice, ...]:
    """Return the devices that the kubelet has allocated and that have no lease yet: they need capacity first.

    Left out are devices of another plugin that served the name before, those that this node could never serve, and
    `placed`: those whose plans are being carried out.
    """
    taken = {device for part in (table.listed, table.pending, table.acquisitions) for device in part}
    return tuple(
        sorted(
            (
                device
                for device in taken
                if device.resource in resources
                and is_agent_id(device.id)
                and device not in leased
                and device not in placed
                and device not in table.unsatisfiable
            ),
            key=lambda device: (device.resource, device.id),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDevices:
    """A container that is starting, its pod, and the agent's devices that were allocated to them."""

    pod: Pod
    """Without a name if only the kubelet's checkpoint has the pod, as for a plain init container."""
    container: str
    container_devices: tuple[KubeletDevice, ...]
    """The devices of the kubelet's call, then the container's others."""
    devices: tuple[KubeletDevice, ...]
    """The devices of all containers of the pod, each once; init containers pass theirs on."""


def container_devices(
    asked: Collection[KubeletDevice],
    listed: Iterable[ListedPod],
    recorded: Sequence[CheckpointEntry],
    resources: Collection[str],
) -> ContainerDevices | None:
    """Return the container that was allocated the devices in `asked`; None if the kubelet knows of none.

    `listed` and `recorded` are the kubelet's list and checkpoint. Devices of other resources than `resources`, the
    names that are served here, are left out.
    """
    wanted = set(asked)
    uid = next((entry.pod_uid for entry in recorded if wanted and wanted <= set(entry.devices)), "")
    own = [entry for entry in recorded if uid and entry.pod_uid == uid]
    everything = [device for entry in own for device in entry.devices]
    # A plain init container is not listed, but the devices that it passes on to another container are.
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
    container = _container_with(wanted, containers)
    return ContainerDevices(
        pod=Pod(namespace=pod.namespace, name=pod.name, uid=uid) if pod else Pod(namespace="", name="", uid=uid),
        container=container,
        container_devices=_served((*asked, *containers.get(container, ())), resources),
        devices=_served((*asked, *everything), resources),
    )


def lease_by_device(view: NodeView) -> Mapping[KubeletDevice, Lease]:
    """Return the active lease of each of the kubelet's devices whose instance is live.

    A device that was lost and replaced has two leases, of which the later counts.
    """
    return {
        device: lease
        for lease in sorted(view.leases.values(), key=lambda lease: lease.created_at)
        for device, instance in zip(devices_of(lease), live_devices(view, lease), strict=False)
        if instance is not None
    }


def leased_kubelet_devices(view: NodeView) -> frozenset[KubeletDevice]:
    """Return all devices that pods have leases for, including lost ones: the kubelet counts them as allocated."""
    return frozenset(device for _, owner in leases_of_pods(view) for device in owner.devices)


def first_shared(
    devices: Iterable[KubeletDevice], listed: Sequence[ListedPod]
) -> tuple[KubeletDevice, list[str]] | None:
    """Return the first device that the kubelet allocated to several pods, with their names; None if there is none."""
    for device in devices:
        names = sorted(f"{pod.namespace}/{pod.name}" for pod in listed if device in pod.devices)
        if len(names) > 1:
            return device, names
    return None


def belongs_to(lease: Lease, pod: Pod, ending: Collection[LeaseId], reassigned: Collection[LeaseId] = ()) -> bool:
    """Return whether a lease belongs to exactly this pod and is not about to end.

    Without both UIDs the name decides, except for leases in `reassigned`, whose devices were allocated again.
    """
    owner = pod_owner(lease)
    if owner is None or lease.id in ending:
        return False
    holder = owner.pod
    same_name = (holder.namespace, holder.name) == (pod.namespace, pod.name)
    if holder.uid and pod.uid:
        return same_name and holder.uid == pod.uid
    return same_name and lease.id not in reassigned


def _container_with(wanted: Collection[KubeletDevice], containers: Mapping[str, Collection[KubeletDevice]]) -> str:
    """Return the container whose devices of one resource are those in the kubelet's call; empty if there is none.

    If two containers match, one passes its devices on to the other. The one with more devices is returned: a variable
    that names too many does no harm if the devices of the call come first in it.
    """
    resources = {device.resource for device in wanted}
    exact = [
        name
        for name, devices in containers.items()
        if {device for device in devices if device.resource in resources} == set(wanted)
    ]
    return max(exact, key=lambda name: len(containers[name]), default="")


def _served(devices: Iterable[KubeletDevice], resources: Collection[str]) -> tuple[KubeletDevice, ...]:
    """Return the agent's devices of these resources, each once; another plugin may have served the name before."""
    return tuple(dict.fromkeys(each for each in devices if each.resource in resources and is_agent_id(each.id)))
