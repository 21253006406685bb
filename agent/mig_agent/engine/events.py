"""What happened, told to whoever listens: observers at once, subscribers as they read, and a ring of recent ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

import structlog

from mig_agent.core.errors import Reason, refuse
from mig_agent.core.event import Event

_LOG = structlog.get_logger("mig_agent.engine")

RING = 4096
"""Recent events that a subscriber can resume from."""
MOST_UNREAD = 1024
"""Events that wait for a slow reader before it is dropped."""
MOST_SUBSCRIBERS = 256


class Subscription:
    """One reader's events, in order. Raises RefusedError when it has fallen too far behind."""

    def __init__(self, events: Iterable[Event], close: Callable[[Subscription], None]) -> None:
        self._unread = deque(events)
        self._wake = asyncio.Event()
        self._close = close
        self._overrun = False
        self._ended = False
        if self._unread:
            self._wake.set()

    def push(self, event: Event) -> None:
        """One more."""
        if len(self._unread) >= MOST_UNREAD:
            self._overrun = True
            self._close(self)
        else:
            self._unread.append(event)
        self._wake.set()

    def end(self) -> None:
        """No more come; what waits can still be read."""
        self._ended = True
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._read()

    async def _read(self) -> AsyncIterator[Event]:
        try:
            while True:
                while self._unread and not self._overrun:
                    yield self._unread.popleft()
                if self._overrun:
                    raise refuse(
                        Reason.QUEUE_FULL,
                        f"cannot go on telling what happens: the reader is {MOST_UNREAD} events behind",
                        "read the status, and watch again from its revision",
                    )
                if self._ended:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._close(self)


class Events:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self.observers: list[Callable[[Event], None]] = []
        self._ring: deque[Event] = deque(maxlen=RING)
        self._lost_up_to = 0
        self._subscriptions: set[Subscription] = set()

    def begin(self, revision: int) -> None:
        """Events up to this revision are not in the ring."""
        self._lost_up_to = revision

    def emit(self, event: Event) -> None:
        """Tells everybody."""
        if len(self._ring) == RING:
            self._lost_up_to = max(self._lost_up_to, self._ring[0].revision)
        self._ring.append(event)
        for observer in self.observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001 -- metrics and logs must not stop the engine
                _LOG.exception("an observer of events failed")
        for subscription in tuple(self._subscriptions):
            subscription.push(event)

    def subscribe(self, after_revision: int | None, revision: int) -> Subscription:
        """The events after a revision, or with None those to come. Raises RefusedError.

        REVISION_CHANGED where some of them are no longer known, QUEUE_FULL where too many read already.
        """
        if len(self._subscriptions) >= MOST_SUBSCRIBERS:
            raise refuse(
                Reason.QUEUE_FULL, f"cannot tell one more reader what happens: {MOST_SUBSCRIBERS} read already"
            )
        after = revision if after_revision is None else after_revision
        if after < self._lost_up_to or after > revision:
            raise refuse(
                Reason.REVISION_CHANGED,
                f"cannot resume after revision {after}: the agent knows what happened after {self._lost_up_to} "
                f"up to {revision}",
                "read the status, and watch from its revision",
            )
        subscription = Subscription(
            (event for event in self._ring if event.revision > after), self._subscriptions.discard
        )
        self._subscriptions.add(subscription)
        return subscription

    def end(self) -> None:
        """No more events come."""
        for subscription in tuple(self._subscriptions):
            subscription.end()
