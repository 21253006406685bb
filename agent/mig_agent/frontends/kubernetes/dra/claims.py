"""Prepare and Unprepare: exactly the allocated slots of a claim as one lease, from preparing to unpreparing it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mig_agent.adapters.cdi import CdiError, CdiFolder
from mig_agent.adapters.device_backends import DeviceAccess, joined
from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.core.dra.devices import slots_by_name
from mig_agent.core.dra.names import DRIVER, pool_name
from mig_agent.core.errors import DriverError, MigAgentError, Reason, RefusedError, refuse
from mig_agent.core.model import Holder, Lease, NodeView, Request, RequestId, Slot, Want, live_devices
from mig_agent.core.owner import Claim, ClaimOwner
from mig_agent.engine.callers import Caller
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.dra.allocations import claim_leases
from mig_agent.frontends.kubernetes.dra.api import DriverApi

KUBELET: Final = Caller(name="kubelet", scheduler=True, inside=True)
"""The caller of requests for claims, in the audit record."""
WAIT_SECONDS: Final = 40.0
"""Time for which a claim waits for its slot inside the kubelet's call, which has a deadline of 45 s: after an error the
kubelet would try again only after 60 to 90 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """A device of a claim that is ready."""

    request: str
    """The request of the claim that it is for."""
    pool: str
    device: str
    cdi: str
    """The qualified CDI name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allocated:
    request: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leased:
    """A claim with its lease; none if the claim has no device of this node."""

    claim: Claim
    allocated: tuple[_Allocated, ...]
    leases: tuple[Lease, ...]


class Claims:
    """Prepares and unprepares claims. Not thread-safe; use from the event loop."""

    def __init__(self, manager: Manager, api: DriverApi, cdi: CdiFolder, node: str) -> None:
        self._manager = manager
        self._api = api
        self._cdi = cdi
        self._pool = pool_name(node)
        self._locks: dict[str, asyncio.Lock] = {}
        """Locks by the claim's UID: two pods that share a claim have it prepared at the same time."""

    async def prepare(self, claims: Sequence[Claim]) -> Mapping[str, tuple[PreparedDevice, ...] | MigAgentError]:
        """Lease the allocated slots of a pod's claims and write their CDI files; return devices by UID of the claim.

        A claim that cannot be prepared has an error instead, with words for the pod's Event. Repeated calls give the
        same answer.
        """
        found = await asyncio.gather(*(self._leased_or_error(each) for each in claims))
        leases = [each for each in found if isinstance(each, _Leased)]
        answers: dict[str, tuple[PreparedDevice, ...] | MigAgentError] = {}
        for claim, each in zip(claims, found, strict=True):
            if isinstance(each, _Leased):
                others = [lease for one in leases if one is not each for lease in one.leases]
                try:
                    await self._write_files(each, others)
                except MigAgentError as error:
                    answers[claim.uid] = error
                else:
                    answers[claim.uid] = self._prepared(each)
            else:
                answers[claim.uid] = each
        return answers

    async def _leased_or_error(self, claim: Claim) -> _Leased | MigAgentError:
        try:
            async with self._locks.setdefault(claim.uid, asyncio.Lock()):
                allocated = await self._allocated(claim)
                if not allocated:
                    return _Leased(claim=claim, allocated=(), leases=())
                lease = self._lease_of(claim.uid) or await self._acquire(claim, allocated)
        except MigAgentError as error:
            return error
        return _Leased(claim=claim, allocated=tuple(allocated), leases=(lease,))

    def _prepared(self, each: _Leased) -> tuple[PreparedDevice, ...]:
        return tuple(
            PreparedDevice(
                request=device.request,
                pool=self._pool,
                device=device.device,
                cdi=self._cdi.qualified(_cdi_name(each.claim.uid, number)),
            )
            for number, device in enumerate(each.allocated)
        )

    async def unprepare(self, claim: Claim) -> None:
        """End the claim's lease and remove its CDI files; nothing to do for an unknown claim. Raises MigAgentError."""
        async with self._locks.setdefault(claim.uid, asyncio.Lock()):
            lease = self._lease_of(claim.uid)
            if lease is not None:
                await self._manager.owner_ended(lease.id, "its claim is unprepared: the pods that used it have ended")
            await asyncio.to_thread(self._remove_files, claim.uid)
        self._locks.pop(claim.uid, None)

    def _lease_of(self, uid: str) -> Lease | None:
        return next((lease for lease, owner in claim_leases(self._manager.view) if owner.claim.uid == uid), None)

    async def _allocated(self, claim: Claim) -> Sequence[_Allocated]:
        try:
            facts = await self._api.claim(claim.namespace, claim.name)
        except KubeApiError as error:
            raise refuse(
                Reason.GPU_UNAVAILABLE, f"cannot prepare {claim}: {error.words}", "the kubelet tries again by itself"
            ) from error
        if facts is None or facts.uid != claim.uid:
            raise refuse(Reason.INVALID_REQUEST, f"cannot prepare {claim}: it is gone, or another claim has its name")
        ours = [each for each in facts.devices if each.driver == DRIVER]
        others = sorted({each.pool for each in ours} - {self._pool})
        if others:
            raise refuse(
                Reason.INVALID_REQUEST, f"cannot prepare {claim}: its devices are of {', '.join(others)}, not this node"
            )
        return [_Allocated(request=each.request, device=each.device) for each in ours]

    async def _acquire(self, claim: Claim, allocated: Sequence[_Allocated]) -> Lease:
        slots = _slots(self._manager.view)
        unknown = [each.device for each in allocated if each.device not in slots]
        if unknown:
            raise refuse(
                Reason.GPU_UNAVAILABLE,
                f"cannot prepare {claim}: no GPU of this node offers {', '.join(unknown)} now",
                "the GPU may be lost, or its MIG mode switched: `migctl status` shows it",
            )
        request = Request(
            wants=tuple(Want(slot=slots[each.device], text=each.device) for each in allocated),
            request_id=RequestId(claim.uid),
            holder=Holder(tenant=f"namespace {claim.namespace}", name=str(claim)),
            owner=ClaimOwner(claim=claim, devices=tuple(each.device for each in allocated)),
            wait_seconds=WAIT_SECONDS,
            caller_id=KUBELET.caller_id,
        )
        try:
            granted = await self._manager.acquire(request, KUBELET)
        except RefusedError as error:
            if error.refusal.reason is not Reason.LEASE_ENDED:
                raise
            # Prepared once more after its lease had ended, as after a reboot: a lease of its own, by a new request.
            again = replace(request, request_id=RequestId(f"{claim.uid}-{uuid.uuid4().hex}"))
            granted = await self._manager.acquire(again, KUBELET)
        self._manager.delivered(granted.lease.id)
        return granted.lease

    async def _write_files(self, leased: _Leased, others: Sequence[Lease]) -> None:
        """Write a CDI file for each device of a claim, with variables that name its own device first.

        Of two CDI devices in a container the later one's variables win, so any of them has to name all devices of the
        pod. CUDA ignores those after the first that a container cannot open.
        """
        own = [access for lease in leased.leases for access in self._access(leased.claim, lease)]
        rest = [access for lease in others for access in self._access(leased.claim, lease)]

        def write() -> None:
            for number, device in enumerate(own):
                everything = (device, *own[:number], *own[number + 1 :], *rest)
                variables = {**joined(each.environment for each in everything), "NVIDIA_VISIBLE_DEVICES": "void"}
                name = _cdi_name(leased.claim.uid, number)
                self._cdi.write(name, (device,), variables, with_libraries=number == 0)

        try:
            await asyncio.to_thread(write)
        except CdiError as error:
            raise refuse(Reason.DRIVER_FAILED, error.message, error.hint) from error
        except DriverError as error:
            raise refuse(Reason.DRIVER_FAILED, str(error)) from error

    def _access(self, claim: Claim, lease: Lease) -> list[DeviceAccess]:
        instances = live_devices(self._manager.view, lease)
        if any(each is None for each in instances):
            raise refuse(
                Reason.GPU_UNAVAILABLE,
                f"cannot prepare {claim}: a device of {lease.holder} is lost",
                "delete its pods; `migctl events` tells what happened to the GPU",
            )
        return [self._manager.access(each) for each in instances if each is not None]

    def _remove_files(self, uid: str) -> None:
        for name in self._cdi.names():
            if name.startswith(_cdi_name(uid, "")):
                self._cdi.remove(name)


def message_of(error: MigAgentError) -> str:
    """Return what the pod's Event says about an error."""
    if isinstance(error, RefusedError):
        refusal = error.refusal
        return f"{refusal.message} ({refusal.hint})" if refusal.hint else refusal.message
    return str(error)


def _slots(view: NodeView) -> Mapping[str, Slot]:
    return {name: slot for gpu in view.gpus for name, slot in slots_by_name(gpu.uuid, gpu.layout).items()}


def _cdi_name(uid: str, number: int | str) -> str:
    return f"claim-{uid}-{number}"
