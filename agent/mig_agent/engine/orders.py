"""What is to become a lease, as it goes from the queue to its execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mig_agent.core.model import Request
from mig_agent.engine.callers import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to become a lease."""

    request: Request
    caller: Caller
    digest: str
    hold: bool
    pid_started: int | None
    go_on: Callable[[], None]
    """Raises when nobody wants the lease any more."""
