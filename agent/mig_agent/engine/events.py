"""Distribution of events: to observers at once, subscribers as they read, and a ring of recent ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

import structlog

from mig_agent.core.errors import Reason, Refusal, RefusedError, refuse
from mig_agent.core.events import IRRELEVANT_TO_PLANS, Event

_LOG = structlog.get_logger("mig_agent.engine")

RING = 4096
"""Recent events that a subscriber can resume from."""
MOST_UNREAD = 1024
"""Events that wait for a slow reader before it is dropped, beside those that it asked for on resuming."""
MOST_SUBSCRIBERS = 256
UNKNOWN = "unknown"
"""In place of what has changed since a revision, where that is not remembered."""


class Subscription:
    """One reader's events, in order. Raises RefusedError when it has fallen too far behind.

    Whoever has one closes it, also when nothing was read from it.
    """

    def __init__(self, events: Iterable[Event], forget: Callable[[Subscription], None]) -> None:
        self._unread = deque(events)
        # What it missed comes on top, so that one that has just resumed is not too slow already.
        self._most = len(self._unread) + MOST_UNREAD
        self._wake = asyncio.Event()
        self._forget = forget
        self._ended = False
        self.overrun = False
        """Whether so much is unread that nothing more is kept for the reader."""
        if self._unread:
            self._wake.set()

    def push(self, event: Event) -> None:
        """One more."""
        if len(self._unread) < self._most:
            self._unread.append(event)
        else:
            self.overrun = True
            self.close()
        self._wake.set()

    def end(self) -> None:
        """No more come; what waits can still be read."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """Nothing more is kept for the reader; harmless when repeated."""
        self._unread.clear()
        self._forget(self)
        self.end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            if self.overrun:
                raise refuse(
                    Reason.QUEUE_FULL,
                    f"cannot go on telling what happens: the reader is {self._most} events behind",
                    "read the status, and watch again from its revision",
                )
            if self._unread:
                return self._unread.popleft()
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()


class Events:
    """Emits events to observers and subscribers, and remembers recent ones.

    Not thread-safe; use from the event loop.
    """

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

    def changed_since(self, revision: int, now: int) -> tuple[str, ...]:
        """The kinds of what has happened after a revision and matters to plans, each once and the first one first.

        `now` is the node's revision. Only UNKNOWN where not all of it is known any more.
        """
        if not self._lost_up_to <= revision <= now:
            return (UNKNOWN,)
        kinds = (each.kind for each in self._ring if each.revision > revision)
        return tuple(dict.fromkeys(kind.value for kind in kinds if kind not in IRRELEVANT_TO_PLANS))

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
            raise RefusedError(
                Refusal(
                    reason=Reason.REVISION_CHANGED,
                    message=f"cannot resume after revision {after}: the agent knows what happened after "
                    f"{self._lost_up_to} up to {revision}",
                    hint="read the status, and watch from its revision",
                    revision=revision,
                    changed=(UNKNOWN,),
                )
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
