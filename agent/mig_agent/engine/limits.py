"""Checks requests against the limits in the settings, counting what is held from the leases and plans in progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from mig_agent.core import limits
from mig_agent.core.errors import Refusal, RefusedError
from mig_agent.core.limits import Amount, Held, LimitedCaller, UsageLimits
from mig_agent.core.model import CallerId, Lease, Request
from mig_agent.core.requests import describe
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.execution import Executor, LeaseRequest

_MOST_GROUPS = 10_000
"""The most groups of requests that are remembered; later ones get new numbers."""


@dataclass(frozen=True, slots=True)
class HeldNow:
    """The amounts held at one moment, and the answers that were computed for them."""

    held: Held
    known: dict[int, Refusal | None] = field(default_factory=dict)
    """By `LimitCheck.group_of`."""


class LimitCheck:
    """Applies the limits to requests and renewals. What is held and the limits themselves are read at each use.

    Pods that the kubelet admitted are never refused, since the kubelet has their devices allocated by then; they count
    for the tenant of their namespace. Not thread-safe; use from the event loop.
    """

    def __init__(self, context: Context, executor: Executor) -> None:
        self._context = context
        self._executor = executor
        self._groups: dict[tuple[object, ...], int] = {}
        self._next_group = 0

    @property
    def _limits(self) -> UsageLimits:
        return self._context.settings.limits

    def prepared(self, request: Request, caller: Caller) -> Request:
        """Return a request with the `ttl` that it gets. Raises RefusedError if it is outside its limits in any case.

        The deadline of a lease that is reserved for a pod is its scheduler's, and has no limits.
        """
        if not self._limits or caller.inside:
            return request
        refusal = self.never(request, caller)
        if refusal is not None:
            raise RefusedError(refusal)
        if request.owner.is_reserved:
            return request
        ttl = limits.ttl_within(self._limits, _account(request, caller), request.ttl_seconds)
        if isinstance(ttl, Refusal):
            raise RefusedError(limits.named(ttl, f"serve {describe(request)}"))
        return replace(request, ttl_seconds=ttl)

    def never(self, request: Request, caller: Caller) -> Refusal | None:
        """Return why a request is outside its limits whatever else is held; None if it is not."""
        if not self._limits or caller.inside:
            return None
        view = self._context.state.working_view
        memory = sum(gpu.layout.memory_mib for gpu in view.gpus) << 20
        amount = limits.amount_of(view, request)
        return _of(request, limits.never_within(self._limits, _account(request, caller), request, amount, memory))

    def refuse_renewal(self, lease: Lease, ttl_seconds: float | None, caller: Caller) -> None:
        """Raise RefusedError if a lease cannot be renewed for this time. Administrators may renew any lease."""
        if not self._limits or caller.admin or caller.inside or lease.owner.is_reserved:
            return
        account = _account_of(caller, lease.caller_id, lease.holder.tenant)
        refusal = limits.renewal_within(self._limits, account, ttl_seconds)
        if refusal is not None:
            raise RefusedError(limits.named(refusal, f"renew lease {lease.id}"))

    def held(self) -> HeldNow | None:
        """Return what is held now, for several calls of `exceeded` at the same moment; None if there are no limits."""
        if not self._limits:
            return None
        state = self._context.state
        return HeldNow(limits.held(state.working_view, state.leases.values(), self._in_progress()))

    def group_of(self, request: Request, caller: Caller) -> int:
        """Return a number that only requests of the same caller and tenant for the same devices share."""
        key = (caller.caller_id, caller.role, request.holder.tenant, request.wants, request.gpus)
        group = self._groups.get(key)
        if group is None:
            self._next_group += 1
            if len(self._groups) > _MOST_GROUPS:
                self._groups.clear()
            group = self._groups[key] = self._next_group
        return group

    def exceeded(self, request: Request, caller: Caller, now: HeldNow | None, group: int = 0) -> Refusal | None:
        """Return why a request cannot be granted beside what is held now; None if it can.

        `group` is what `group_of` returned, if that is known: many requests of one user wait for the same.
        """
        if now is None or caller.inside:
            return None
        group = group or self.group_of(request, caller)
        if group not in now.known:
            amount = limits.amount_of(self._context.state.working_view, request)
            refusal = limits.exceeded_now(self._limits, _account(request, caller), amount, now.held)
            now.known[group] = _of(request, refusal)
        return now.known[group]

    def within(self, asked: Iterable[tuple[Request, Caller | None]]) -> Iterator[bool]:
        """Yield for each request whether it could be granted beside what is held and what was granted of those before.

        One whose caller is not known has no limits.
        """
        now = self.held()
        held = None if now is None else now.held
        over: set[int] = set()
        amounts: dict[int, Amount] = {}
        for request, caller in asked:
            if held is None or caller is None:
                yield True
                continue
            group = self.group_of(request, caller)
            if group not in amounts:
                amounts[group] = limits.amount_of(self._context.state.working_view, request)
            account, amount = _account(request, caller), amounts[group]
            # What is held only grows, so that what was too much once is too much for the next one, too.
            if group in over or (
                not caller.inside and limits.exceeded_now(self._limits, account, amount, held) is not None
            ):
                over.add(group)
                yield False
                continue
            held = held.beside(account.caller_id, account.tenant, amount)
            yield True

    def too_many_waiting(self, order: LeaseRequest, waiting: Iterator[Request]) -> Refusal | None:
        """Return why a request cannot wait beside those that wait; None if it can."""
        if not self._limits or order.caller.inside:
            return None
        account = _account(order.request, order.caller)
        of_caller = of_tenant = 0
        for each in waiting:
            of_caller += each.caller_id == account.caller_id
            of_tenant += each.holder.tenant == account.tenant
        return _of(order.request, limits.too_many_waiting(self._limits, account, of_caller, of_tenant))

    def _in_progress(self) -> Iterator[tuple[CallerId, str, Amount]]:
        for each in self._executor.in_progress:
            request = each.request
            yield request.caller_id, request.holder.tenant, limits.of_profiles(s.profile for s in each.slots)


def _of(request: Request, refusal: Refusal | None) -> Refusal | None:
    return None if refusal is None else limits.named(refusal, f"serve {describe(request)}")


def _account(request: Request, caller: Caller) -> LimitedCaller:
    return _account_of(caller, caller.caller_id, request.holder.tenant)


def _account_of(caller: Caller, caller_id: CallerId, tenant: str) -> LimitedCaller:
    names = [str(caller), *([] if caller.uid is None else [f"uid {caller.uid}", str(caller.uid)])]
    return LimitedCaller(caller_id=caller_id, names=tuple(dict.fromkeys(names)), role=caller.role.value, tenant=tenant)
