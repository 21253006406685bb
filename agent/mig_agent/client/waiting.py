"""Sends a waiting Acquire request again when an agent that went away is back, within the request's own wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mig_agent.client.absence import Absence, OnAway, WaitLimit
from mig_agent.client.errors import ClientError

if TYPE_CHECKING:
    from mig_agent.client.connection import BaseConnection
    from mig_agent.client.hold_stream import OnQueued
    from mig_agent.client.types import QueuePosition

_PAUSE_SECONDS = 1.0


class Waiting:
    """One request that may wait. The connection's own retries are over when this decides to go on."""

    def __init__(
        self,
        connection: BaseConnection,
        wait: str | float | None,
        on_queued: OnQueued | None,
        on_away: OnAway | None,
    ) -> None:
        """Begin to wait now. Raises UsageError."""
        from mig_agent.client import request_args  # noqa: PLC0415 -- reading a node's state needs none of it

        self._connection = connection
        self._on_queued = on_queued
        self._limit = WaitLimit(request_args.seconds(wait))
        self._absence = Absence(on_away, after=0.0)

    def report(self, position: QueuePosition) -> None:
        """Pass on a position in the queue."""
        self.over()
        if self._on_queued is not None:
            self._on_queued(position)

    def over(self) -> None:
        """Note that the agent has answered."""
        self._connection.record_answer()
        self._absence.over()

    def pause_after(self, error: ClientError) -> float:
        """Return how many seconds to pause before the request is sent again.

        Raises the error unless the agent was there before and may be back within the wait.
        """
        if not self._limit.left or not self._connection.is_worth_repeating(error):
            raise error
        self._absence.failed(error)
        return min(_PAUSE_SECONDS, self._limit.left)
