"""The event bus: observers are called at once, subscribers read at their own pace, and a ring keeps recent events."""

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
"""How many recent events are kept, for subscribers that resume."""
MOST_UNREAD = 1024
"""How many events a subscriber may fall behind before it is dropped, beside those that it asked for on resuming."""
MOST_SUBSCRIBERS = 256
UNKNOWN = "unknown"
"""The kind of event that replaces all changes since a revision if they are no longer in the ring."""


class Subscription:
    """Iterates over one subscriber's events in order. Raises RefusedError (QUEUE_FULL) when it is too far behind.

    Its owner closes it, also when nothing was read from it.
    """

    def __init__(self, events: Iterable[Event], forget: Callable[[Subscription], None]) -> None:
        self._unread = deque(events)
        # The events that it resumes with come on top, so that it is not too slow from the beginning.
        self._most = len(self._unread) + MOST_UNREAD
        self._wake = asyncio.Event()
        self._forget = forget
        self._ended = False
        self.overrun = False
        """Whether it fell too far behind: nothing more is kept for it then."""
        if self._unread:
            self._wake.set()

    def push(self, event: Event) -> None:
        """Add an event; closes the subscription where too many are unread."""
        if len(self._unread) < self._most:
            self._unread.append(event)
        else:
            self.overrun = True
            self.close()
        self._wake.set()

    def end(self) -> None:
        """End the iteration after the events that are unread now."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """Unsubscribe, and drop what is unread; harmless when repeated."""
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
        """Note the revision to start from: no event up to it can be resumed from."""
        self._lost_up_to = revision

    def emit(self, event: Event) -> None:
        """Call the observers with an event, queue it for each subscriber, and keep it in the ring."""
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
        """Return the kinds of the events after a revision that matter to plans, each once and in order of appearance.

        `now` is the node's revision. Returns UNKNOWN alone where the ring does not reach back so far.
        """
        if not self._lost_up_to <= revision <= now:
            return (UNKNOWN,)
        kinds = (each.kind for each in self._ring if each.revision > revision)
        return tuple(dict.fromkeys(kind.value for kind in kinds if kind not in IRRELEVANT_TO_PLANS))

    def subscribe(self, after_revision: int | None, revision: int) -> Subscription:
        """Subscribe to the events after a revision, or with None to those from now on; `revision` is the node's.

        Raises RefusedError: REVISION_CHANGED where the ring does not reach back so far, or the revision is not reached
        yet; QUEUE_FULL where there are too many subscribers.
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
        """End all subscriptions: the agent stops."""
        for subscription in tuple(self._subscriptions):
            subscription.end()
