"""Operations on active leases: release, renewal, binding to the pod that they were taken for, and their end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from mig_agent.adapters.ledger.records import ArriveLease
from mig_agent.core.errors import DriverError, LedgerError, Reason, RefusedError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.model import KubeletDevice, Lease, LeaseId, Pod
from mig_agent.core.quantities import shown
from mig_agent.engine.callers import Caller, may_change
from mig_agent.engine.context import Context
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.journal import ledger_refusal
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle, leases_without_answering_devices


class Leases:
    """Releases and renews active leases, and binds them to pods. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, memory: RequestLog, lifetimes: LeaseLifecycle) -> None:
        self._context = context
        self._memory = memory
        self._lifetimes = lifetimes

    async def release(self, lease: LeaseId, token: str, caller: Caller, *, force: bool = False) -> None:
        """End a lease, as `Manager.release` describes. Raises RefusedError."""
        if force and not caller.admin:
            raise refuse(Reason.NOT_PERMITTED, f"cannot release lease {lease} by force: that is for administrators")
        await self._lifetimes.settled(lease)
        known = self._known(lease, token, caller, force=force)
        if known is not None and self._is_its_pods(known):
            await self._refuse_used(known)
            # Meanwhile it may have been handed over to its pod, or have ended.
            await self._lifetimes.settled(lease)
            known = self._known(lease, token, caller, force=force)
        if known is None:
            return
        try:
            # Who has the token of a lease is its holder, whatever the transport knows.
            by = str(caller) if caller.name or caller.admin else "its holder"
            reason = EndReason.RELEASED
            if self._is_its_pods(known):
                by, reason = f"{by} by force, while its pod is on this node", EndReason.FORCED
            await self._lifetimes.end(lease, reason, by=by, caller=caller)
        except LedgerError as error:
            raise ledger_refusal(error, f"release lease {lease}") from error

    async def confirm(self, lease: LeaseId) -> None:
        """Confirm a lease, as `Manager.confirm` describes. Raises RefusedError."""
        await self._lifetimes.settled(lease)
        if lease not in self._context.state.leases:
            raise _ended(f"confirm lease {lease}")
        try:
            await self._lifetimes.confirm(lease)
        except LedgerError as error:
            raise ledger_refusal(error, f"confirm lease {lease}") from error

    async def renew(self, lease: LeaseId, token: str, ttl_seconds: float | None, caller: Caller) -> Lease:
        """Set another deadline, as `Manager.renew` describes. Raises RefusedError."""
        await self._lifetimes.settled(lease)
        known = self._known(lease, token, caller)
        if known is None:
            raise _ended(f"renew lease {lease}")
        expires_at = None if ttl_seconds is None else self._context.clock.now() + ttl_seconds
        try:
            renewed = await self._lifetimes.renew(known, expires_at, caller)
        except LedgerError as error:
            raise ledger_refusal(error, f"renew lease {lease}") from error
        if lease not in self._context.state.leases:
            raise _ended(f"renew lease {lease}")  # its instance was lost meanwhile
        return renewed

    async def end_for_pod(self, lease: LeaseId, words: str) -> None:
        """End the lease of a pod, as `Manager.end_for_pod` describes. Raises RefusedError."""
        try:
            await self._lifetimes.end(lease, EndReason.POD_ENDED, why=words)
        except LedgerError as error:
            raise ledger_refusal(error, f"end lease {lease}") from error

    async def arrived(self, lease: LeaseId, pod: Pod, devices: Sequence[KubeletDevice] | None = None) -> Lease:
        """Bind a lease to its pod, and with `devices` assign the kubelet's devices to its instances.

        Raises RefusedError where the lease has ended, or is another pod's, or the ledger cannot be written.
        """
        context, what = self._context, f"give lease {lease} to {pod}"
        # A pending write may bind it to another pod. Between here and the next record nothing else runs.
        await self._lifetimes.settled(lease)
        context.refuse_when_closing()
        before = context.state.leases.get(lease)
        if before is None:
            raise refuse(Reason.LEASE_ENDED, f"cannot {what}: it has ended", "`migctl events` tells why")
        after = _arrived(before, pod, devices, what)
        if after == before:
            return before
        try:
            await self._write(after)
        except LedgerError as error:
            raise ledger_refusal(error, what) from error
        standing = context.state.leases.get(lease)
        if standing is None:
            raise refuse(Reason.LEASE_ENDED, f"cannot {what}: it has ended", "`migctl events` tells why")
        return standing

    async def _write(self, lease: Lease) -> None:
        context = self._context
        as_what = f" as {', '.join(str(each) for each in lease.kubelet_devices)}" if lease.kubelet_devices else ""
        event = context.journal.event(
            EventKind.LEASE_BOUND,
            f"{lease.holder.pod} has come for lease {lease.id}{as_what}",
            gpu=next((each.slot.gpu for each in context.state.instances_of(lease.id)), None),
            lease=lease.id,
            holder=str(lease.holder),
            tenant=lease.holder.tenant,
            pod=lease.holder.pod,
        )

        def apply() -> None:
            current = context.state.leases.get(lease.id)
            if current is not None:
                came = replace(current, holder=lease.holder, arrived=True, expires_at=None)
                context.state.put_lease(replace(came, kubelet_devices=lease.kubelet_devices))
                self._lifetimes.arrived(lease.id)

        written = context.journal.write((ArriveLease(lease),), (event,), apply)
        self._lifetimes.settle(lease.id, written)
        # The caller may be cancelled; the lease is bound all the same.
        await asyncio.shield(written)

    def _is_its_pods(self, lease: Lease) -> bool:
        """Return whether a lease ends with its pod, and this agent learns when that is."""
        return lease.of_pod and self._context.settings.follows_pods

    async def _refuse_used(self, lease: Lease) -> None:
        """Raise RefusedError where an instance of a lease is in use, or that cannot be found out."""
        context, what = self._context, f"release lease {lease.id}"
        if lease.id in leases_without_answering_devices(context.state):
            raise _untold(what, "the GPU that it is on does not answer")
        for instance in tuple(context.state.instances_of(lease.id)):
            context.gate.refuse_when_paused(what)
            try:
                with context.gate.inside():
                    users = await context.users(instance)
            except DriverError as error:
                raise _untold(what, str(error)) from error
            if users:
                raise refuse(
                    Reason.IN_USE,
                    f"cannot {what}: {context.place(instance)} is held by {', '.join(users)}",
                    "end what uses it, or its pod",
                )

    def _known(self, lease: LeaseId, token: str, caller: Caller, *, force: bool = False) -> Lease | None:
        """Return a lease that the caller may change; None for one that has ended. Raises RefusedError.

        A bound lease is refused; with `force` only if the kubelet has allocated devices for it: its containers have
        those open.
        """
        standing = self._context.state.leases.get(lease)
        tokens = self._context.tokens
        remembered = self._memory.of_lease(lease)
        if may_change(tokens, lease, standing or (remembered.lease if remembered else None), token, caller):
            if standing is None and remembered is None and not tokens.matches(lease, token):
                raise _unknown(lease)
            if standing is not None and self._is_its_pods(standing) and (not force or standing.kubelet_devices):
                raise _of_pod(standing)
            return standing
        if standing is None and remembered is None:
            raise _unknown(lease)
        raise refuse(
            Reason.WRONG_TOKEN,
            f"cannot touch lease {lease}: the token is not its token"
            if token
            else f"cannot touch lease {lease}: it takes its token, since you are not who asked for it",
            "give the token that came with the lease: --token",
        )


def _ended(what: str) -> RefusedError:
    return refuse(Reason.LEASE_ENDED, f"cannot {what}: it has ended", "ask for a new one")


def _arrived(lease: Lease, pod: Pod, devices: Sequence[KubeletDevice] | None, what: str) -> Lease:
    """Return a lease as bound to a pod. Raises RefusedError where it is another pod's, or has other devices."""
    taken_for = lease.holder.pod
    if taken_for is None or not taken_for.may_be(pod):
        raise refuse(Reason.IN_USE, f"cannot {what}: {lease.holder} has it", "it was taken for somebody else")
    if devices is None and lease.kubelet_devices:
        return lease
    given = lease.kubelet_devices if devices is None else tuple(devices)
    if lease.kubelet_devices not in {(), given}:
        raise refuse(
            Reason.IN_USE,
            f"cannot {what}: it has it already, as {', '.join(str(each) for each in lease.kubelet_devices)}",
        )
    if given and len(given) != len(lease.instances):
        raise refuse(
            Reason.INVALID_REQUEST,
            f"cannot {what}: it has {len(lease.instances)} devices, and {len(given)} are to stand for them",
        )
    holder = replace(lease.holder, pod=replace(taken_for, uid=taken_for.uid or pod.uid))
    return replace(lease, holder=holder, arrived=True, expires_at=None, kubelet_devices=given)


def _untold(what: str, why: str) -> RefusedError:
    return refuse(
        Reason.GPU_UNAVAILABLE,
        f"cannot {what}: cannot tell whether it is in use: {why}",
        "end its pod, and it ends; or try again when the GPU answers",
    )


def _of_pod(lease: Lease) -> RefusedError:
    pod = lease.holder.pod
    devices = ", ".join(str(each) for each in lease.kubelet_devices)
    return refuse(
        Reason.IN_USE,
        f"cannot touch lease {lease.id}: {lease.holder} has it as long as it is on this node"
        + (f", as {devices}" if devices else ""),
        f"kubectl delete pod {pod.name} -n {pod.namespace}" if pod is not None and pod.name else "delete that pod",
    )


def _unknown(lease: LeaseId) -> RefusedError:
    return refuse(
        Reason.UNKNOWN_LEASE,
        f"cannot find lease {shown(lease)}: it never was, or ended long ago",
        "see `migctl status`",
    )
