"""Which request led to which lease, also after the lease's end, so that a retry gets the same answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace

from mig_agent.adapters.ledger.reader import RecordedLease
from mig_agent.adapters.ledger.store import MOST_ENDED_IN_MEMORY, Ledger
from mig_agent.core.errors import LedgerError
from mig_agent.core.model import LeaseId, Request, RequestKey
from mig_agent.engine.callers import Caller
from mig_agent.engine.journal import ledger_refusal


def digest_of(request: Request, caller: Caller) -> str:
    """What makes two requests the same: all that decides the answer, and who asks.

    How long to wait and when does not: a retry may be more patient.
    """
    asked = (
        [
            (
                want.memory_bytes,
                want.profile,
                want.fraction,
                want.whole_gpu,
                want.min_compute_slices,
                sorted(want.attributes),
            )
            for want in request.wants
        ],
        request.gpus,
        *_given(request, caller),
        request.ttl_seconds,
        request.owner.identity(),
        caller.uid,
        # What a user of this machine is called may not be known at every moment.
        caller.name if caller.uid is None else "",
    )
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]


def _given(request: Request, caller: Caller) -> tuple[str, str]:
    """Tenant and name as the request gave them: what the caller is called may change from one try to the next."""
    tenant, name, own = request.holder.tenant, request.holder.name, str(caller)
    if name == own or name.startswith(f"{own} ("):
        name = name[len(own) :]
    return "" if tenant == caller.tenant else tenant, name


class RequestLog:
    """Standing leases by request, all of them; ended ones, the latest of them: the ledger knows the others."""

    def __init__(self, ledger: Ledger, leases: Iterable[RecordedLease], *, more_ended: bool) -> None:
        self._ledger = ledger
        self._more_ended = more_ended
        self._standing: dict[RequestKey, RecordedLease] = {}
        self._request_of: dict[LeaseId, RequestKey] = {}
        self._ended: dict[RequestKey, RecordedLease] = {}
        for each in leases:
            if each.ended_at is None:
                self.granted(each)
            else:
                request = self._request_of[each.lease.id] = each.lease.request_key
                self._ended[request] = each

    def granted(self, lease: RecordedLease) -> None:
        """A new lease."""
        request = self._request_of[lease.lease.id] = lease.lease.request_key
        self._standing[request] = lease

    def ended(self, lease: LeaseId, at: float, reason: str) -> None:
        """A lease that stands no more."""
        request = self._request_of.get(lease)
        found = None if request is None else self._standing.pop(request, None)
        if request is None or found is None:
            return
        self._ended[request] = replace(found, ended_at=at, end_reason=reason)
        if len(self._ended) > MOST_ENDED_IN_MEMORY:
            self._forget(next(iter(self._ended)))
            self._more_ended = True

    def forget_before(self, moment: float) -> bool:
        """Leases that ended before are forgotten; whether the ledger may have some to forget."""
        old = []
        for request, each in self._ended.items():
            if each.ended_at is None or each.ended_at >= moment:
                break  # they are in the order in which they ended
            old.append(request)
        for request in old:
            self._forget(request)
        return bool(old) or self._more_ended

    def of_request(self, request: RequestKey) -> RecordedLease | None:
        """Return the lease that a request led to; None for a new one.

        Raises RefusedError where the ledger cannot be asked.
        """
        found = self._standing.get(request) or self._ended.get(request)
        if found is not None or not self._more_ended:
            return found
        try:
            return self._ledger.find_request(request)
        except LedgerError as error:
            raise ledger_refusal(error) from error

    def of_lease(self, lease: LeaseId) -> RecordedLease | None:
        """What is remembered of a lease; None where it ended long ago or never was."""
        request = self._request_of.get(lease)
        return None if request is None else self._standing.get(request) or self._ended.get(request)

    def _forget(self, request: RequestKey) -> None:
        gone = self._ended.pop(request)
        self._request_of.pop(gone.lease.id, None)
