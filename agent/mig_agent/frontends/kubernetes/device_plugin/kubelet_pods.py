"""Follows the kubelet's pods: leases of pods that are gone end, and so do requests that wait for them.

Fail-closed: a pod ends only by what the kubelet or the API server says, never by their silence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import structlog

from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.adapters.kubelet import CheckpointEntry, Identity, KubeletError, ListedPod
from mig_agent.core.errors import RefusedError
from mig_agent.core.model import Lease
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.device_plugin.allocations import Acquisition, AllocationTable
from mig_agent.frontends.kubernetes.device_plugin.api import DevicePluginApi
from mig_agent.frontends.kubernetes.owners import leases_of_pods
from mig_agent.frontends.kubernetes.pods.kubelet_evidence import (
    Listing,
    PodLiveness,
    Seen,
    liveness_from_api,
    liveness_from_kubelet,
)

BUSY_SECONDS = 1.0
"""Between two looks while pods have devices, or ask for some."""
IDLE_SECONDS = 5.0
_MOST_ASKED = 5
"""Pods that the API server is asked about in one look; it has other nodes to answer, too."""
_ASKING_SECONDS = 3.0
"""No more of them are asked about in one look: the kubelet's word must not wait for a server that is slow."""

_LOG = structlog.get_logger(__name__)
Held = tuple[Pod, tuple[KubeletDevice, ...]]
"""A pod and the devices that it has or asks for."""


class PodLister(Protocol):
    """What is asked of the kubelet."""

    @property
    def kubelet(self) -> Identity | None:
        """Which run of it answers."""
        ...

    async def list(self) -> tuple[ListedPod, ...]:
        """Its pods. Raises KubeletError."""
        ...


class KubeletPods:
    """Follows the pods of the kubelet and ends leases of removed ones. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        manager: Manager,
        book: AllocationTable,
        kubelet: PodLister,
        recorded: Callable[[], tuple[CheckpointEntry, ...]],
        api: DevicePluginApi | None,
        node: str,
        changed: Callable[[], None],
    ) -> None:
        self._manager = manager
        self._book = book
        self._kubelet = kubelet
        self._recorded = recorded
        self._api = api
        self._node = node
        self._changed = changed
        self._seen = Seen()
        self._asked: dict[Held, int] = {}
        """The number of the question that was last asked about each of whom the kubelet's list does not tell."""
        self._questions = 0
        self._silent = False
        self._poke = asyncio.Event()

    def soon(self) -> None:
        """Looks at once."""
        self._poke.set()

    async def run(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # noqa: BLE001 -- whatever it was, pods must be followed on
                _LOG.exception("cannot follow the pods of this node now")
            busy = self._book.on_way or self._book.acquisitions or self._book.ending or self._pods_leases()
            self._poke.clear()
            # No wait_for: before Python 3.12 it forgets that it was cancelled when what it waits for comes then, too.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BUSY_SECONDS if busy else IDLE_SECONDS):
                    await self._poke.wait()

    async def look(self) -> None:
        """Asks the kubelet once, if it can be asked now, and draws the consequences."""
        if self._book.giving:
            return
        # What is granted or asked for while the kubelet answers is not judged by that answer.
        leases = self._pods_leases()
        waiting = self._book.under_way()
        asked_at = asyncio.get_running_loop().time()
        before = self._kubelet.kubelet
        try:
            pods = await self._kubelet.list()
        except KubeletError as error:
            self._tell_silence(str(error))
            return
        self._silent = False
        recorded = await asyncio.to_thread(self._recorded) if self._book.on_way else ()
        listing = Listing.of(before if before == self._kubelet.kubelet else None, pods)
        matter: list[Held] = [
            *((owner.pod, owner.devices) for _, owner in leases),
            *((each.pod, each.owner.devices) for each in waiting),
        ]
        fates = {each: liveness_from_kubelet(*each, listing, self._seen) for each in matter}
        self._seen.note(listing, matter)
        self._book.noted(
            frozenset(listing.owners), asked_at, {device for entry in recorded for device in entry.devices}
        )
        await self._draw({each for each, fate in fates.items() if fate is PodLiveness.GONE}, leases, waiting)
        # Last, since the API server may take its time.
        gone = await self._ask([each for each, fate in fates.items() if fate is PodLiveness.UNSURE], listing)
        if gone:
            await self._draw(gone, leases, waiting)

    async def _draw(
        self, gone: Collection[Held], leases: Sequence[tuple[Lease, PodOwner]], waiting: Sequence[Acquisition]
    ) -> None:
        """Ends what pods held or asked for that are gone; of pods that share a name each by its own devices."""
        book = self._book
        for lease, owner in leases:
            if (owner.pod, owner.devices) in gone:
                book.ending.setdefault(lease.id, "its pod has ended")
        for acquisition in waiting:
            if (acquisition.pod, acquisition.owner.devices) in gone:
                book.forget(acquisition)
                acquisition.task.cancel()
        await self._end()
        self._changed()

    async def _ask(self, unsure: Sequence[Held], listing: Listing) -> frozenset[Held]:
        """Those whose pod is gone by the API server's word."""
        gone: set[Held] = set()
        self._asked = {each: self._asked.get(each, 0) for each in unsure}
        # In turn: those who live on must not keep the others from being asked about.
        next_ones = sorted(self._asked, key=self._asked.__getitem__)[:_MOST_ASKED]
        until = asyncio.get_running_loop().time() + _ASKING_SECONDS
        for pod, devices in next_ones:
            if self._api is None or asyncio.get_running_loop().time() > until:
                break
            self._questions += 1
            self._asked[pod, devices] = self._questions
            try:
                facts = await self._api.pod(pod.namespace, pod.name)
            except KubeApiError as error:
                _LOG.debug("a pod is taken to live on", pod=str(pod), why=error.words)
                break
            is_listed = (pod.namespace, pod.name) in listing.names
            if liveness_from_api(pod, facts, is_listed=is_listed, node=self._node) is PodLiveness.GONE:
                gone.add((pod, devices))
        return frozenset(gone)

    async def _end(self) -> None:
        for lease, words in tuple(self._book.ending.items()):
            try:
                await self._manager.owner_ended(lease, words)
            except RefusedError as error:
                _LOG.warning(error.refusal.message, hint=error.refusal.hint)
                return  # at the next look
            self._book.ended(lease)

    def _pods_leases(self) -> tuple[tuple[Lease, PodOwner], ...]:
        return tuple(each for each in leases_of_pods(self._manager.view) if each[1].devices)

    def _tell_silence(self, words: str) -> None:
        if not self._silent:
            self._silent = True
            _LOG.warning(words, hint="pods are taken to live on until the kubelet answers")
