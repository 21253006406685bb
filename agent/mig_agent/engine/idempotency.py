"""Idempotency: which request led to which lease, also after its end, so that a retry gets the same answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from mig_agent.adapters.ledger.reader import RecordedLease
from mig_agent.adapters.ledger.store import MOST_ENDED_IN_MEMORY, Ledger
from mig_agent.core.errors import LedgerError
from mig_agent.core.model import LeaseId, Request, RequestKey
from mig_agent.engine.callers import Caller
from mig_agent.engine.journal import ledger_refusal


def digest_of(request: Request, caller: Caller) -> str:
    """Return a digest of all that decides the answer to a request, and of its caller: equal for equal requests.

    Wait time, priority and expected revision are not part of it: they may differ in a retry.
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
                # Requests without these have the digest that versions before them recorded.
                *(() if want.isolation is None else (want.isolation,)),
                *(() if want.compute_percent is None else (want.compute_percent,)),
            )
            for want in request.wants
        ],
        request.gpus,
        *_given(request, caller),
        request.ttl_seconds,
        request.owner.identity(),
        caller.uid,
        # The name of a local user may be unknown for a moment, so the uid counts.
        caller.name if caller.uid is None else "",
    )
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]


def _given(request: Request, caller: Caller) -> tuple[str, str]:
    """Return tenant and name as the request gave them, without the caller's, which may change between two tries."""
    tenant, name, own = request.holder.tenant, request.holder.name, str(caller)
    if name == own or name.startswith(f"{own} ("):
        name = name[len(own) :]
    return "" if tenant == caller.tenant else tenant, name


class RequestLog:
    """Finds the lease of a request: all active ones and the latest ended ones in memory, older ones in the ledger.

    Not thread-safe; use from the event loop.
    """

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
        """Remember a new lease."""
        request = self._request_of[lease.lease.id] = lease.lease.request_key
        self._standing[request] = lease

    def ended(self, lease: LeaseId, at: float, reason: str) -> None:
        """Note that a lease has ended, when (seconds since the epoch) and why; does nothing if it is not active."""
        request = self._request_of.get(lease)
        found = None if request is None else self._standing.pop(request, None)
        if request is None or found is None:
            return
        self._ended[request] = RecordedLease(lease=found.lease, digest=found.digest, ended_at=at, end_reason=reason)
        if len(self._ended) > MOST_ENDED_IN_MEMORY:
            self._forget(next(iter(self._ended)))
            self._more_ended = True

    def forget_before(self, moment: float) -> bool:
        """Forget the leases that ended before a moment; return whether the ledger may have some to forget."""
        old = []
        for request, each in self._ended.items():
            if each.ended_at is None or each.ended_at >= moment:
                break  # they are in the order in which they ended
            old.append(request)
        for request in old:
            self._forget(request)
        return bool(old) or self._more_ended

    def of_request(self, request: RequestKey) -> RecordedLease | None:
        """Return the lease of a request, active or ended; None for a new one.

        One whose caller is not recorded is found by its request id alone; its digest shows whether it is the same.
        Raises RefusedError where the ledger cannot be read.
        """
        found = self._standing.get(request) or self._ended.get(request)
        if found is not None or not self._more_ended:
            return found
        try:
            return self._ledger.find_request(request)
        except LedgerError as error:
            raise ledger_refusal(error) from error

    def of_lease(self, lease: LeaseId) -> RecordedLease | None:
        """Return a lease, active or ended; None where it is unknown or ended too long ago."""
        request = self._request_of.get(lease)
        return None if request is None else self._standing.get(request) or self._ended.get(request)

    def _forget(self, request: RequestKey) -> None:
        gone = self._ended.pop(request)
        self._request_of.pop(gone.lease.id, None)
