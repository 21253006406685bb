"""Binding: gives a starting pod the leases that are reserved for it, before anything else is leased for its devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.core.errors import Reason, RefusedError, refuse
from mig_agent.core.model import Lease, Slot
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.device_plugin.allocations import AllocationTable
from mig_agent.frontends.kubernetes.device_plugin.api import DevicePluginApi, pod_in_time
from mig_agent.frontends.kubernetes.device_plugin.messages import wanted
from mig_agent.frontends.kubernetes.pod_leases import pod_owner
from mig_agent.frontends.kubernetes.reservations import leases_for, match_slots, slots_of
from mig_agent.frontends.kubernetes.resources import Resource

_CHANGED: Final = frozenset({Reason.LEASE_ENDED, Reason.IN_USE})
"""Refusals after which the current leases decide: the lease has ended, or another call has bound it."""

_LOG = structlog.get_logger(__name__)


class Binder:
    """Binds leases that are reserved for pods to devices of the kubelet. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        manager: Manager,
        table: AllocationTable,
        api: DevicePluginApi | None,
        resources: Mapping[str, Resource],
        send_event: Callable[[Pod, str, str], None],
    ) -> None:
        """Bind devices of `resources`, by name. `send_event` takes a pod, and the reason and message of an event."""
        self._manager = manager
        self._table = table
        self._api = api
        self._resources = resources
        self._send_event = send_event

    async def bind(self, pod: Pod, missing: Sequence[KubeletDevice]) -> bool:
        """Bind a lease that is reserved for the pod to some of the devices for which the pod has no lease yet.

        A reserved lease that fits none of them is ended. Returns whether anything has changed: the caller then reads
        the pod's leases again, and calls again. Raises RefusedError if the pod's leases cannot be found out, or the
        change not committed.
        """
        view = self._manager.view
        found = leases_for(view, pod)
        if not found:
            return False
        known = await self._reserved_for(pod, found)
        view = self._manager.view
        mine = tuple(each for each in leases_for(view, pod) if each.id in known)
        groups = tuple(slots_of(each, view) for each in mine)
        wants = tuple(self._resources[each.resource].want for each in missing)
        layouts = {uuid: gpu.layout for uuid, gpu in view.by_uuid.items()}
        for lease, group, places in zip(mine, groups, match_slots(groups, wants, layouts), strict=True):
            if places is None or not group:
                if not _is_certain(lease):
                    continue  # perhaps reserved for the next pod of this name; it expires by itself
                if not group and self._manager.paused:
                    continue  # the GPUs are not read, and no container starts
                await self._end(pod, lease, group, missing)
                return True
            devices = tuple(missing[place] for place in places)
            if not await self._cancel_requests(devices):
                await self._bind(lease, devices, pod)
            return True
        return False

    async def _reserved_for(self, pod: Pod, found: Sequence[Lease]) -> frozenset[str]:
        """Return the leases that were reserved for this pod, and not for a former one of its name."""
        taken_for = {lease.id: owner.pod.uid for lease in found if (owner := pod_owner(lease)) is not None}
        known = frozenset(taken_for.values()) - {""}
        uids = frozenset({pod.uid})
        if not pod.uid and known:
            uids = await self._uids(pod)
        return frozenset(lease for lease, uid in taken_for.items() if not uid or uid in uids)

    async def _uids(self, pod: Pod) -> frozenset[str]:
        """Return the UIDs of the pod that has this name now, from the API server. Raises RefusedError."""
        words = "there is no API server"
        if self._api is not None:
            try:
                facts = await pod_in_time(self._api, pod.namespace, pod.name)
            except KubeApiError as error:
                words = error.words
            else:
                return frozenset() if facts is None else facts.uids
        raise refuse(
            Reason.GPU_UNAVAILABLE,
            f"cannot tell whether {pod} is the one for which a lease was taken: {words}",
            "the kubelet tries again by itself",
        )

    async def _cancel_requests(self, devices: Sequence[KubeletDevice]) -> bool:
        """Cancel the open requests for these devices, and wait for their end; return whether there were any."""
        waiting = {id(each): each for each in map(self._table.acquisitions.get, devices) if each is not None}
        for each in waiting.values():
            self._table.remove(each)
            each.task.cancel()
            await asyncio.wait((each.task,))
            await self._manager.wait_until_answered(each.request.key)
        return bool(waiting)

    async def _bind(self, lease: Lease, devices: Sequence[KubeletDevice], pod: Pod) -> None:
        try:
            await self._manager.bind(lease.id, PodOwner(pod=pod, devices=tuple(devices), is_bound=True))
        except RefusedError as error:
            if error.refusal.reason not in _CHANGED:
                raise
            _LOG.info(error.refusal.message)
            return
        for device in devices:
            self._table.pending.pop(device, None)

    async def _end(self, pod: Pod, lease: Lease, group: Sequence[Slot], missing: Sequence[KubeletDevice]) -> None:
        what = f"lease {lease.id} that was taken for it"
        if group:
            lacks = f"the pod lacks {wanted(missing)}" if missing else "the pod has all that it asks for"
            await self._manager.owner_ended(lease.id, f"it fits no device of its pod: {lacks}")
            self._send_event(pod, "PromiseNotUsed", f"{what} fits none of its devices and has ended: {lacks}")
            return
        # A GPU that is silent may be so for ever, and no container has anything of it yet.
        is_silent = lease.id in self._manager.silent
        why = "the GPU that it is on does not answer" if is_silent else "not all of its devices are there any more"
        await self._manager.owner_ended(lease.id, f"its pod gets another device: {why}")
        self._send_event(pod, "PromiseNotUsed", f"{what} has ended, and it gets another device: {why}")


def _is_certain(lease: Lease) -> bool:
    """Return whether a lease is reserved for one pod with a UID, and not for any pod of that name."""
    owner = pod_owner(lease)
    return owner is not None and bool(owner.pod.uid)
