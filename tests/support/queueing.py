"""The waiting queue, searched in one go."""

from __future__ import annotations

from collections.abc import Sequence

from mig_agent.core.backfill import WaitingRequest
from mig_agent.core.model import NodeView
from mig_agent.core.planning.plan import Plan, Policy
from mig_agent.core.queue import PausedSearch, search


def next_to_start(
    view: NodeView,
    waiting: Sequence[WaitingRequest],
    policy: Policy,
    now: float,
    *,
    limit_seconds: float,
    strict_fifo: bool = False,
    only: WaitingRequest | None = None,
) -> tuple[WaitingRequest, Plan] | None:
    """Return what `search` finds when nothing makes it pause."""
    found = search(view, waiting, policy, now, limit_seconds=limit_seconds, strict_fifo=strict_fifo, only=only)
    assert not isinstance(found, PausedSearch)
    return found
