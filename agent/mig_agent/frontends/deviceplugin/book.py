"""What the plugin knows beside the ledger: devices on their way, and requests under way for pods."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mig_agent.core.errors import Refusal
from mig_agent.core.model import KubeletDevice, Lease, LeaseId, Pod, Request, RequestKey
from mig_agent.engine.answers import Granted
from mig_agent.frontends.deviceplugin.ids import is_ours

ON_WAY_SECONDS = 10.0
"""From Allocate until the kubelet surely lists the pod, if it took it."""
HIDDEN_SECONDS = 300.0
"""The same for a plain init container, which it never lists: its image may have to be pulled first."""


@dataclass(slots=True, eq=False, kw_only=True)
class Acquisition:
    """A request of a pod on its way through the manager; it outlives the calls that wait for it."""

    pod: Pod
    request: Request
    since: float
    task: asyncio.Task[Granted | Refusal]
    """Its outcome; it fails only for what was not expected."""
    told: bool = False
    """Whether the pod's events say that it waits."""


@dataclass(slots=True)
class Book:
    """Belongs to the event loop."""

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
    abandoned: set[RequestKey] = field(default_factory=set)
    """Requests that nobody waits for any more; a lease that one of them leads to all the same ends."""
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
        for device in acquisition.request.kubelet_devices:
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
            if device not in listed and asked_at < at + (HIDDEN_SECONDS if device in recorded else ON_WAY_SECONDS)
        }


def unserved(
    book: Book, leased: Mapping[KubeletDevice, Lease], placed: Collection[KubeletDevice], resources: Collection[str]
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
                and is_ours(device.id)
                and device not in leased
                and device not in placed
                and device not in book.hopeless
            ),
            key=lambda device: (device.resource, device.id),
        )
    )
