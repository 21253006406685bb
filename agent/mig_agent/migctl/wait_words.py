"""Words for a wait: when a request is likely to start and by what that is judged, and what blocks it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mig_agent.core.errors import Blocker
from mig_agent.core.quantities import counted
from mig_agent.migctl.failures import one_line

if TYPE_CHECKING:
    from mig_agent.client.types import QueuePosition, StartEstimate

_SOON_SECONDS = 5.0
"""What may start this soon is said to start within the rest of the interval."""
OWN_LIMIT = "waits for a limit of its own"
_MOST_HOLDERS = 2
_BRIEFER = ((_MOST_HOLDERS, True), (_MOST_HOLDERS, False), (1, False))
"""Number of holders that are named, with or without the ends of their leases, in ever shorter words."""
_UNITS = ((48 * 3600.0, 24 * 3600.0, "days"), (90 * 60.0, 3600.0, "h"), (90.0, 60.0, "min"), (0.0, 1.0, "s"))
"""From how many seconds on a unit is used, its seconds, and its name."""


def queue_place(position: int) -> str:
    """Return a position in words: `place 2 in the queue`, `next in the queue`."""
    return "next in the queue" if position == 1 else f"place {position} in the queue"


def wait_line(prefix: str, position: QueuePosition, suffix: str, columns: float = math.inf) -> str:
    """Return what is known of a wait on one line of fewer characters than `columns`, where that is possible.

    What does not fit goes in this order: by what the start is judged, `suffix`, long words for short ones, when the
    holders' leases end, the names of all holders but one, and last who blocks.
    """
    estimate, limit, blockers = position.estimate, one_line(position.limit), position.blockers
    if limit:
        own = f"{OWN_LIMIT}: {limit}"
        choices = [(own, suffix), (own, ""), (OWN_LIMIT, suffix), (OWN_LIMIT, ""), ("", suffix), ("", "")]
    else:
        start = "" if estimate is None else likely_start(estimate)
        because = f"{start} ({basis(estimate)})" if estimate is not None and start else ""
        short, held = start.replace("likely to start", "likely"), blocked_by(blockers)
        brief = [blocked_by(blockers, brief=True, most=most, ends=ends) for most, ends in _BRIEFER]
        whole = _joined(start, held)
        choices = [(_joined(because, held), suffix), (whole, suffix), (whole, ""), (_joined(short, held), "")]
        choices += [(_joined(short, each), "") for each in brief]
        choices += [(start, suffix), (start, ""), (short, ""), *((each, "") for each in brief), ("", suffix), ("", "")]
    lines = [_joined(f"{prefix}{queue_place(position)}", words) + end for words, end in choices]
    return next((line for line in lines if len(line) < columns), lines[-1])


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def likely_start(estimate: StartEstimate) -> str:
    """Return `likely to start in 4-12 min`; empty if nothing is known."""
    interval = start_interval(estimate)
    return f"likely to start {interval}" if interval else ""


def start_interval(estimate: StartEstimate | None) -> str:
    """Return `in 4-12 min`, `within 20 s` or `in 4 min or later`; empty if nothing is known."""
    if estimate is None or (estimate.earliest is None and estimate.latest is None):
        return ""
    early, late = estimate.earliest or 0.0, estimate.latest
    if late is None:
        return f"in {_rough(early, math.floor)} or later" if early >= _SOON_SECONDS else ""
    if early < _SOON_SECONDS:
        return f"within {_rough(late, math.ceil)}"
    low, high = _rough(early, math.floor), _rough(late, math.ceil)
    if low == high:
        return f"in about {high}"
    number, _, unit = low.partition(" ")
    return f"in {number}-{high}" if high.endswith(f" {unit}") else f"in {low} to {high}"


def basis(estimate: StartEstimate) -> str:
    """Return by what an estimate is judged: `from the last 57 leases: half wait under 7 min`, `from deadlines`."""
    if estimate.basis == "deadlines":
        return "from deadlines"
    words = f"from the last {counted(estimate.leases, 'lease')}" if estimate.leases else f"from {estimate.basis}"
    return words if estimate.median is None else f"{words}: half wait under {_rough(estimate.median, math.ceil)}"


def blocked_by(
    blockers: Sequence[Blocker], *, brief: bool = False, most: int = _MOST_HOLDERS, ends: bool = True
) -> str:
    """Return what blocks a request: `GPU 0 is held by bob (train), until 14:05`; empty if nothing is known.

    With `brief`: `GPU 0: bob (train), until 14:05`. At most `most` holders are named, and with `ends` when their leases
    end.
    """
    if not blockers:
        return ""
    gpu = blockers[0].gpu_index
    here = [each for each in blockers if each.gpu_index == gpu]
    holders = list(dict.fromkeys(_holder(each, ends=ends) for each in here if each.holder))
    if not holders:
        return one_line(here[0].describe())
    more = f" and {len(holders) - most} more" if len(holders) > most else ""
    return one_line(f"GPU {gpu}{':' if brief else ' is held by'} {' and '.join(holders[:most])}{more}")


def _holder(blocker: Blocker, *, ends: bool) -> str:
    if blocker.expires_at is None or not ends:
        return blocker.holder
    return f"{blocker.holder}, until {_clock_time(blocker.expires_at)}"


def _clock_time(moment: float) -> str:
    """Return a moment of the next 20 hours as `14:05`, a later one as `Mon 14:05` or with its date."""
    try:
        local = time.localtime(moment)
    except (OverflowError, ValueError, OSError):
        return "?"
    ahead = moment - time.time()
    if ahead < 20 * 3600:
        return time.strftime("%H:%M", local)
    return time.strftime("%a %H:%M" if ahead < 6 * 86400 else "%Y-%m-%d %H:%M", local)


def _rough(seconds: float, rounded: Callable[[float], int]) -> str:
    """Return a duration in one unit: `45 s`, `12 min`, `5 h`."""
    size, name = next((size, name) for least, size, name in _UNITS if seconds >= least)
    return f"{max(rounded(seconds / size), 1)} {name}"
