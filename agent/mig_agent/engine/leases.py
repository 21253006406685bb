"""Operations on active leases: release, renewal, binding to the owner that they were reserved for, and their end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mig_agent.adapters.ledger.records import BindLease
from mig_agent.core.errors import DriverError, LedgerError, Reason, RefusedError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.model import Lease, LeaseId
from mig_agent.core.owner import Owner
from mig_agent.core.quantities import shown
from mig_agent.engine.callers import Caller, may_change
from mig_agent.engine.context import Context
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.journal import ledger_refusal
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle, leases_without_answering_devices
from mig_agent.engine.limits import LimitCheck


class Leases:
    """Releases and renews active leases, and binds them to their owners. Not thread-safe; use from the event loop."""

    def __init__(
        self, context: Context, request_log: RequestLog, lifecycle: LeaseLifecycle, limits: LimitCheck
    ) -> None:
        self._context = context
        self._request_log = request_log
        self._lifecycle = lifecycle
        self._limits = limits

    async def release(self, lease: LeaseId, token: str, caller: Caller, *, force: bool = False) -> None:
        """End a lease, as `Manager.release` describes. Raises RefusedError."""
        if force and not caller.admin:
            raise refuse(Reason.NOT_PERMITTED, f"cannot release lease {lease} by force: that is for administrators")
        await self._lifecycle.wait_for_pending_commit(lease)
        known = self._known(lease, token, caller, force=force)
        if known is not None and self._only_owner_ends(known):
            await self._refuse_if_used(known)
            # The lease may have been bound, or have ended, meanwhile.
            await self._lifecycle.wait_for_pending_commit(lease)
            known = self._known(lease, token, caller, force=force)
        if known is None:
            return
        try:
            # A caller with the lease's token is its holder, even if the transport does not identify it.
            by = str(caller) if caller.name or caller.admin else "its holder"
            reason = EndReason.RELEASED
            if self._only_owner_ends(known):
                by, reason = f"{by} by force, while its {known.owner.noun} is on this node", EndReason.FORCED
            await self._lifecycle.end(lease, reason, by=by, caller=caller)
        except LedgerError as error:
            raise ledger_refusal(error, f"release lease {lease}") from error

    async def confirm(self, lease: LeaseId) -> None:
        """Confirm a lease, as `Manager.confirm` describes. Raises RefusedError."""
        await self._lifecycle.wait_for_pending_commit(lease)
        if lease not in self._context.state.leases:
            raise _ended(f"confirm lease {lease}")
        try:
            await self._lifecycle.confirm(lease)
        except LedgerError as error:
            raise ledger_refusal(error, f"confirm lease {lease}") from error

    async def renew(self, lease: LeaseId, token: str, ttl_seconds: float | None, caller: Caller) -> Lease:
        """Set another deadline, as `Manager.renew` describes. Raises RefusedError."""
        await self._lifecycle.wait_for_pending_commit(lease)
        known = self._known(lease, token, caller)
        if known is None:
            raise _ended(f"renew lease {lease}")
        self._limits.refuse_renewal(known, ttl_seconds, caller)
        expires_at = None if ttl_seconds is None else self._context.clock.now() + ttl_seconds
        try:
            renewed = await self._lifecycle.renew(known, expires_at, caller)
        except LedgerError as error:
            raise ledger_refusal(error, f"renew lease {lease}") from error
        if lease not in self._context.state.leases:
            raise _ended(f"renew lease {lease}")  # its instance was lost meanwhile
        return renewed

    async def owner_ended(self, lease: LeaseId, words: str) -> None:
        """End a lease since its owner has ended, as `Manager.owner_ended` describes. Raises RefusedError."""
        known = self._context.state.leases.get(lease)
        if known is None:
            return
        try:
            await self._lifecycle.end(lease, known.owner.end_reason, why=words)
        except LedgerError as error:
            raise ledger_refusal(error, f"end lease {lease}") from error

    async def bind(self, lease: LeaseId, owner: Owner) -> Lease:
        """Bind a reserved lease to its owner, as `Manager.bind` describes. Raises RefusedError."""
        context, what = self._context, f"give lease {lease} to {owner.label}"
        # A pending write may bind it to another owner. Between here and the next record nothing else runs.
        await self._lifecycle.wait_for_pending_commit(lease)
        context.refuse_when_closing()
        before = context.state.leases.get(lease)
        if before is None:
            raise refuse(Reason.LEASE_ENDED, f"cannot {what}: it has ended", "`migctl events` tells why")
        bound = before.owner.bind(owner, what=what, holder=str(before.holder), instances=len(before.instances))
        if bound == before.owner:
            return before
        try:
            await self._commit_binding(replace(before, owner=bound, expires_at=None))
        except LedgerError as error:
            raise ledger_refusal(error, what) from error
        current = context.state.leases.get(lease)
        if current is None:
            raise refuse(Reason.LEASE_ENDED, f"cannot {what}: it has ended", "`migctl events` tells why")
        return current

    async def _commit_binding(self, lease: Lease) -> None:
        context, owner = self._context, lease.owner
        as_what = f" as {owner.devices_text}" if owner.devices_text else ""
        event = context.journal.event(
            EventKind.LEASE_BOUND,
            f"{owner.label} has come for lease {lease.id}{as_what}",
            gpu=next((each.slot.gpu for each in context.state.instances_of(lease.id)), None),
            lease=lease.id,
            holder=str(lease.holder),
            tenant=lease.holder.tenant,
            owner=owner,
        )

        def apply() -> None:
            current = context.state.leases.get(lease.id)
            if current is not None:
                context.state.put_lease(replace(current, owner=owner, expires_at=None))
                self._lifecycle.bound(lease.id)

        written = context.journal.commit((BindLease(lease),), (event,), apply)
        self._lifecycle.track_commit(lease.id, written)
        # The lease is bound even if the caller is cancelled.
        await asyncio.shield(written)

    def _only_owner_ends(self, lease: Lease) -> bool:
        """Return whether only the end of its owner ends the lease, and this agent notices that end."""
        return lease.owner.is_bound and self._context.settings.follows_pods

    async def _refuse_if_used(self, lease: Lease) -> None:
        """Raise RefusedError if an instance of a lease is in use, or if that cannot be determined."""
        context, what = self._context, f"release lease {lease.id}"
        if lease.id in leases_without_answering_devices(context.state):
            raise _use_unknown(lease, "the GPU that it is on does not answer")
        for instance in tuple(context.state.instances_of(lease.id)):
            context.driver_use.refuse_when_paused(what)
            try:
                with context.driver_use.inside():
                    users = await context.users(instance)
            except DriverError as error:
                raise _use_unknown(lease, str(error)) from error
            if users:
                raise refuse(
                    Reason.IN_USE,
                    f"cannot {what}: {context.place(instance)} is held by {', '.join(users)}",
                    f"end what uses it, or its {lease.owner.noun}",
                )

    def _known(self, lease: LeaseId, token: str, caller: Caller, *, force: bool = False) -> Lease | None:
        """Return a lease that the caller may change; None for one that has ended. Raises RefusedError.

        A bound lease is refused; with `force` only if its devices are known to be in use.
        """
        active = self._context.state.leases.get(lease)
        tokens = self._context.tokens
        remembered = self._request_log.of_lease(lease)
        if may_change(tokens, lease, active or (remembered.lease if remembered else None), token, caller):
            if active is None and remembered is None and not tokens.matches(lease, token):
                raise _unknown(lease)
            if active is not None and self._only_owner_ends(active) and (not force or active.owner.is_in_use):
                raise _bound(active)
            return active
        if active is None and remembered is None:
            raise _unknown(lease)
        held = active or (remembered.lease if remembered else None)
        raise _not_permitted(lease, held, with_token=bool(token))


def _not_permitted(lease: LeaseId, held: Lease | None, *, with_token: bool) -> RefusedError:
    """Return the refusal of a caller that may not change a lease: with whose it is, as status shows it to everybody."""
    whose = f"it is held by {held.holder}" if held is not None else "it is held by somebody else"
    ask = f"ask {held.holder.tenant or held.holder} or an administrator" if held is not None else "ask an administrator"
    if with_token:
        words, hint = f"the token is not its token; {whose}", f"give the token that came with the lease, or {ask}"
    else:
        words, hint = whose, f"{ask}; if it is yours, give the token that came with it: --token"
    return refuse(Reason.WRONG_TOKEN, f"cannot touch lease {lease}: {words}", hint)


def _ended(what: str) -> RefusedError:
    return refuse(Reason.LEASE_ENDED, f"cannot {what}: it has ended", "ask for a new one")


def _use_unknown(lease: Lease, why: str) -> RefusedError:
    return refuse(
        Reason.GPU_UNAVAILABLE,
        f"cannot release lease {lease.id}: cannot tell whether it is in use: {why}",
        f"end its {lease.owner.noun}, and it ends; or try again when the GPU answers",
    )


def _bound(lease: Lease) -> RefusedError:
    owner = lease.owner
    return refuse(
        Reason.IN_USE,
        f"cannot touch lease {lease.id}: {lease.holder} has it as long as it is on this node"
        + (f", as {owner.devices_text}" if owner.devices_text else ""),
        owner.end_hint,
    )


def _unknown(lease: LeaseId) -> RefusedError:
    return refuse(
        Reason.UNKNOWN_LEASE,
        f"cannot find lease {shown(lease)}: it never was, or ended long ago",
        "see `migctl status`",
    )
