"""Limits: how much each user and each tenant may hold, wait for and ask for, and who set that.

A request is checked when it comes and again before it is granted. What it takes is counted before it is placed: on a
node with several GPU models as on the model where it takes most. Everything here is a value or a pure function; what
is held is counted from the leases each time, never kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.model import CallerId, Gpu, Lease, NodeView, Profile, Request
from mig_agent.core.planning.profiles import served_by
from mig_agent.core.planning.search import named_gpus
from mig_agent.core.quantities import counted, format_duration, format_memory

UNNAMED: Final = "cannot exceed a limit: "
"""The beginning of the messages here, until `named` says what was refused."""
EVERY: Final = "*"
"""The key of the limits of each tenant that has none of its own."""
WHOLE_GPU_SLICES: Final = 8
"""The memory slices that a GPU leased whole counts as: those of every MIG-capable data-centre GPU but the A30."""


class Limit(StrEnum):
    """The limits that can be set. The values are the names in the configuration."""

    MEMORY = "memory"
    MEMORY_SLICES = "memory_slices"
    SHARE = "share"
    LEASES = "leases"
    WAITING = "waiting"
    LONGEST_TTL = "longest_ttl"
    DEFAULT_TTL = "default_ttl"
    LOWEST_PRIORITY = "lowest_priority"
    HIGHEST_PRIORITY = "highest_priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitValue:
    """The value of one limit, and the setting that it comes from."""

    value: float
    """Bytes, memory slices, a number, a fraction, seconds or a priority."""
    text: str
    """The value as the administrator wrote it."""
    setting: str
    """`limits.users.alice.memory in /etc/mig-agent/config.yaml, line 12`."""


LimitValues: TypeAlias = "Mapping[Limit, LimitValue]"
_NO_BOUNDS: Final[LimitValues] = MappingProxyType({})
_NOTHING: Final[Mapping[str, LimitValues]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLimits:
    """All limits of a node: one immutable value, replaced as a whole when the configuration is read again."""

    roles: Mapping[str, LimitValues] = field(default_factory=lambda: _NOTHING)
    """By role: the limits of each single user with that role, where `users` has none."""
    users: Mapping[str, LimitValues] = field(default_factory=lambda: _NOTHING)
    """By the name of a user or certificate, or the number of a user."""
    tenants: Mapping[str, LimitValues] = field(default_factory=lambda: _NOTHING)
    """By tenant, for all of its leases together; EVERY for each tenant without an own value."""

    def __bool__(self) -> bool:
        """Return True if there is any limit."""
        return bool(self.roles or self.users or self.tenants)


NO_LIMITS: Final = UsageLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedCaller:
    """Who a request counts for: its caller, and the tenant of its lease."""

    caller_id: CallerId
    names: tuple[str, ...]
    """The names by which `UsageLimits.users` may name the caller; the first is shown in messages."""
    role: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What leases hold, or what a request takes."""

    memory_bytes: int = 0
    memory_slices: int = 0
    leases: int = 0

    def __add__(self, other: Amount) -> Amount:
        """Return both together."""
        return Amount(
            memory_bytes=self.memory_bytes + other.memory_bytes,
            memory_slices=self.memory_slices + other.memory_slices,
            leases=self.leases + other.leases,
        )


NOTHING_HELD: Final = Amount()


@dataclass(frozen=True, slots=True)
class Held:
    """What is held on a node, by caller and by tenant."""

    by_caller: Mapping[CallerId, Amount]
    by_tenant: Mapping[str, Amount]
    node_memory_bytes: int
    """The memory of all GPUs of the node, of which `share` is a fraction."""

    def beside(self, caller: CallerId, tenant: str, more: Amount) -> Held:
        """Return what is held once a caller and a tenant hold more."""
        return replace(
            self,
            by_caller={**self.by_caller, caller: self.by_caller.get(caller, NOTHING_HELD) + more},
            by_tenant={**self.by_tenant, tenant: self.by_tenant.get(tenant, NOTHING_HELD) + more},
        )


@dataclass(frozen=True, slots=True)
class _Scope:
    """The limits of a user or of a tenant, and what counts against them."""

    who: str
    """For messages: `alice`, `tenant vision`."""
    bounds: LimitValues
    is_tenant: bool


def of_profiles(profiles: Iterable[Profile]) -> Amount:
    """Return what one lease of devices of these profiles holds."""
    memory = slices = 0
    for each in profiles:
        memory += each.memory_bytes
        slices += slices_of(each)
    return Amount(memory_bytes=memory, memory_slices=slices, leases=1)


def slices_of(profile: Profile) -> int:
    """Return the memory slices that a device of this profile counts as."""
    return WHOLE_GPU_SLICES if profile.kind.takes_whole_gpu else profile.memory_slices


def amount_of(view: NodeView, request: Request) -> Amount:
    """Return what a request takes: on a node with several GPU models as on the one where it takes most."""
    layouts: dict[int, Gpu] = {id(gpu.layout): gpu for gpu in named_gpus(view, request)}
    memory = slices = 0
    for want in request.wants:
        gpus = [view.by_uuid[want.slot.gpu]] if want.slot is not None else layouts.values()
        profiles = [each for each in (served_by(want, gpu) for gpu in gpus) if each is not None]
        memory += max((each.memory_bytes for each in profiles), default=0)
        slices += max(map(slices_of, profiles), default=0)
    return Amount(memory_bytes=memory, memory_slices=slices, leases=1)


def held(view: NodeView, leases: Iterable[Lease], in_progress: Iterable[tuple[CallerId, str, Amount]] = ()) -> Held:
    """Return what the leases hold, and what the plans in progress will: each its caller, tenant and amount."""
    by_caller: dict[CallerId, Amount] = {}
    by_tenant: dict[str, Amount] = {}

    def add(caller: CallerId, tenant: str, amount: Amount) -> None:
        by_caller[caller] = by_caller.get(caller, NOTHING_HELD) + amount
        by_tenant[tenant] = by_tenant.get(tenant, NOTHING_HELD) + amount

    instances = view.instances
    for lease in leases:
        there = (instances.get(each) for each in lease.instances)
        profiles = (each.slot.profile for each in there if each is not None)
        add(lease.caller_id, lease.holder.tenant, of_profiles(profiles))
    for each in in_progress:
        add(*each)
    memory = sum(gpu.layout.memory_mib for gpu in view.gpus) << 20
    return Held(by_caller, by_tenant, memory)


def never_within(
    limits: UsageLimits, account: LimitedCaller, request: Request, amount: Amount, memory: int
) -> Refusal | None:
    """Return why a request is outside its limits whatever else is held; None if it is not.

    `amount` is what it takes, and `memory` the memory of the node's GPUs in bytes.
    """
    for scope in _scopes(limits, account):
        bounds = scope.bounds
        low, high = bounds.get(Limit.LOWEST_PRIORITY), bounds.get(Limit.HIGHEST_PRIORITY)
        if high is not None and request.priority > high.value:
            what = f"priority {request.priority} is above {high.text}, the highest of {scope.who}"
            return _outside(what, high, f"ask with --priority {high.text} or lower")
        if low is not None and request.priority < low.value:
            what = f"priority {request.priority} is below {low.text}, the lowest of {scope.who}"
            return _outside(what, low, f"ask with --priority {low.text} or higher")
        for found, words in _exceeded(scope, NOTHING_HELD, amount, memory):
            return _outside(words, found, "ask for less, or ask an administrator to raise the limit")
    return None


def exceeded_now(limits: UsageLimits, account: LimitedCaller, amount: Amount, now: Held) -> Refusal | None:
    """Return why a request cannot be granted beside what its caller and its tenant hold now; None if it can."""
    for scope in _scopes(limits, account):
        if scope.is_tenant:
            own = now.by_tenant.get(account.tenant, NOTHING_HELD)
        else:
            own = now.by_caller.get(account.caller_id, NOTHING_HELD)
        for found, words in _exceeded(scope, own, amount, now.node_memory_bytes):
            hint = "release a lease, or wait until one ends with --wait 10m; an administrator can raise the limit"
            return _refusal(Reason.LIMIT_EXCEEDED, words, found, hint)
    return None


def too_many_waiting(limits: UsageLimits, account: LimitedCaller, of_caller: int, of_tenant: int) -> Refusal | None:
    """Return why a request cannot wait beside the waiting requests of its caller and its tenant; None if it can."""
    for scope in _scopes(limits, account):
        bound, waiting = scope.bounds.get(Limit.WAITING), of_tenant if scope.is_tenant else of_caller
        if bound is not None and waiting + 1 > bound.value:
            words = f"{scope.who} has {counted(waiting, 'waiting request')} of at most {bound.text}"
            hint = "ask again when one was served, or cancel one with `migctl cancel`"
            return _refusal(Reason.LIMIT_EXCEEDED, words, bound, hint)
    return None


def ttl_within(limits: UsageLimits, account: LimitedCaller, ttl_seconds: float | None) -> float | Refusal | None:
    """Return the `ttl` of a new lease: the one asked for, else the default, else the longest; or why it is too long."""
    longest = _shortest(limits, account, Limit.LONGEST_TTL)
    if ttl_seconds is not None:
        return renewal_within(limits, account, ttl_seconds) or ttl_seconds
    given = [each.value for each in (longest, _shortest(limits, account, Limit.DEFAULT_TTL)) if each is not None]
    return min(given, default=None)


def renewal_within(limits: UsageLimits, account: LimitedCaller, ttl_seconds: float | None) -> Refusal | None:
    """Return why a lease cannot be renewed for this time, with None for ever; None if it can."""
    longest = _shortest(limits, account, Limit.LONGEST_TTL)
    if longest is None or (ttl_seconds is not None and ttl_seconds <= longest.value):
        return None
    asked = "no deadline" if ttl_seconds is None else f"a ttl of {format_duration(ttl_seconds)}"
    words = f"{asked} is longer than {longest.text}, the longest for {account.names[0]}"
    return _outside(words, longest, f"give --ttl {longest.text} or less, and renew the lease in time")


def _shortest(limits: UsageLimits, account: LimitedCaller, which: Limit) -> LimitValue | None:
    given = [scope.bounds[which] for scope in _scopes(limits, account) if which in scope.bounds]
    return min(given, key=lambda each: each.value, default=None)


def _scopes(limits: UsageLimits, account: LimitedCaller) -> Iterator[_Scope]:
    """Yield the limits of the caller and of the tenant; a value under the own name wins over the general one."""
    own = next((limits.users[name] for name in account.names if name in limits.users), _NO_BOUNDS)
    by_role = limits.roles.get(account.role, _NO_BOUNDS)
    if own or by_role:
        yield _Scope(account.names[0], {**by_role, **own}, is_tenant=False)
    of_tenant = {**limits.tenants.get(EVERY, _NO_BOUNDS), **limits.tenants.get(account.tenant, _NO_BOUNDS)}
    if of_tenant:
        yield _Scope(f"tenant {account.tenant or 'without a name'}", of_tenant, is_tenant=True)


def _exceeded(scope: _Scope, own: Amount, more: Amount, node_memory: int) -> Iterator[tuple[LimitValue, str]]:
    """Yield each limit that is exceeded with `more` beside what is held, in words."""
    bounds, total = scope.bounds, own + more
    bound = bounds.get(Limit.LEASES)
    if bound is not None and total.leases > bound.value:
        own_leases = f"holds {own.leases} of at most" if own.leases else "may hold at most"
        yield bound, f"{scope.who} {own_leases} {counted(int(bound.value), 'lease')}"
    bound = bounds.get(Limit.MEMORY)
    if bound is not None and total.memory_bytes > bound.value:
        yield bound, _beside(scope, own.leases, _gib(own.memory_bytes), bound.text, _gib(more.memory_bytes))
    bound = bounds.get(Limit.MEMORY_SLICES)
    if bound is not None and total.memory_slices > bound.value:
        of = counted(int(bound.value), "memory slice")
        yield bound, _beside(scope, own.leases, str(own.memory_slices), of, str(more.memory_slices))
    bound = bounds.get(Limit.SHARE)
    if bound is not None and total.memory_bytes > bound.value * node_memory:
        most = f"{_gib(int(bound.value * node_memory))}, its share of {bound.text} of the node"
        yield bound, _beside(scope, own.leases, _gib(own.memory_bytes), most, _gib(more.memory_bytes))


def _beside(scope: _Scope, leases: int, own: str, most: str, more: str) -> str:
    if not leases:
        return f"{scope.who} may hold at most {most}, and this takes {more}"
    return f"{scope.who} holds {own} of at most {most}, and this takes {more} more"


def _gib(amount: int) -> str:
    """Return an amount of memory for messages, to a hundredth of a Gi."""
    hundredth = (1 << 30) // 100
    return format_memory(amount) if amount < hundredth else f"{amount / (1 << 30):.2f}".rstrip("0").rstrip(".") + "Gi"


def _outside(words: str, bound: LimitValue, hint: str) -> Refusal:
    return _refusal(Reason.OUTSIDE_LIMITS, words, bound, hint)


def _refusal(reason: Reason, words: str, bound: LimitValue, hint: str) -> Refusal:
    return Refusal(reason=reason, message=f"{UNNAMED}{words} (set by {bound.setting})", hint=hint)


def named(refusal: Refusal, action: str) -> Refusal:
    """Return the refusal with its message about this action: "cannot ACTION: ..."."""
    return replace(refusal, message=f"cannot {action}: {refusal.message.removeprefix(UNNAMED)}")
