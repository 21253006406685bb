"""Fair share: the order of the queue within a priority, by how much of the GPUs each tenant used lately.

What a tenant used is GPUs times seconds, each second weighted by its age: after one half-life it counts half. A request
that has waited for the reservation delay is in front of all that have not, first come first, whatever its tenant used.
So a request is never overtaken by one that comes later than the delay after it: the queue's bound on starvation holds,
since the reservation goes to the first of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from mig_agent.core.backfill import WaitingRequest, in_order

OVERDUE: Final = -1.0
"""The rank of a request that has waited for the reservation delay: before every use, which is at least 0."""
_MOST_TENANTS: Final = 10_000
"""The most tenants whose use is remembered; beyond it those that used least are forgotten."""


def decayed(gpus: float, start: float, end: float, now: float, half_life: float) -> float:
    """Return the GPU-seconds of using `gpus` GPUs from `start` to `end`, weighted by their age at `now`."""
    scale = half_life / math.log(2)
    return max(gpus * scale * (_weight(now - end, half_life) - _weight(now - start, half_life)), 0.0)


def _weight(age: float, half_life: float) -> float:
    return math.exp2(-max(age, 0.0) / half_life)


class PastUse:
    """Sums what each tenant used in leases that have ended. Has no clock; callers pass the time."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        """For each tenant the weighted GPU-seconds, and the moment at which they have this weight."""

    def add(self, tenant: str, gpus: float, start: float, end: float, half_life: float) -> None:
        """Add a lease of `gpus` GPUs that lasted from `start` to `end`, in seconds since the epoch."""
        before, at = self._used.get(tenant, (0.0, end))
        moment = max(at, end)
        used = before * _weight(moment - at, half_life) + decayed(gpus, start, end, moment, half_life)
        self._used[tenant] = (used, moment)
        if len(self._used) > _MOST_TENANTS:
            least = sorted(self.at(moment, half_life).items(), key=lambda item: item[1])
            for name, _ in least[: _MOST_TENANTS // 10]:
                del self._used[name]

    def at(self, now: float, half_life: float) -> dict[str, float]:
        """Return the weighted GPU-seconds of each tenant at this moment."""
        return {tenant: used * _weight(now - at, half_life) for tenant, (used, at) in self._used.items()}


def ranked(
    waiting: Iterable[WaitingRequest], used: Mapping[str, float], now: float, limit_seconds: float
) -> tuple[WaitingRequest, ...]:
    """Return the requests in the order of fair share, each with its rank; `used` is by tenant, in GPU-seconds.

    `limit_seconds` is the reservation delay.
    """
    return in_order(with_rank(each, used, now, limit_seconds) for each in waiting)


def with_rank(each: WaitingRequest, used: Mapping[str, float], now: float, limit_seconds: float) -> WaitingRequest:
    """Return a waiting request with its rank at a moment; the other parameters are those of `ranked`."""
    return WaitingRequest(
        request=each.request,
        seq=each.seq,
        since=each.since,
        rank=OVERDUE if now - each.since >= limit_seconds else used.get(each.request.holder.tenant, 0.0),
    )
