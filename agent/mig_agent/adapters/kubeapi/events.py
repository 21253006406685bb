"""Events as `kubectl describe` shows them: which to send, count up or drop. Pure, with bounded memory.

An Event that was sent before is counted up instead of created again, and each object gets a burst of Events and then a
trickle: a cluster's etcd is shared by all its users.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from mig_agent.core.texts import visible

COMPONENT: Final = "mig-agent"
MOST_MESSAGE_BYTES: Final = 1024
"""Limit of an Event's message; the API server refuses longer ones."""
MOST_REMEMBERED: Final = 1000
REMEMBERED_SECONDS: Final = 3000.0
"""Age after which a repeated Event is created again: the API server forgets Events after an hour."""
BURST: Final = 20
REFILL_SECONDS: Final = 60.0
"""Interval between Events of one object after its burst."""
NODE_NAMESPACE: Final = "default"
"""Namespace of the Events about objects that have no namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSubject:
    """The object that an Event is about."""

    kind: str
    name: str
    uid: str
    namespace: str = ""

    @property
    def events_namespace(self) -> str:
        """Namespace of the Events about this object."""
        return self.namespace or NODE_NAMESPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class EventContent:
    """The content of an Event without its time and count: the key by which repeats are found."""

    about: EventSubject
    reason: str
    """One word in CamelCase."""
    words: str
    warning: bool


@dataclass(slots=True)
class SentEvent:
    """An Event that was created at the API server."""

    name: str
    first: float
    count: int


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class EventCorrelator:
    """Finds repeated Events and limits the Events of each object, as client-go's EventCorrelator does."""

    def __init__(self) -> None:
        self._sent: OrderedDict[EventContent, SentEvent] = OrderedDict()
        self._buckets: OrderedDict[EventSubject, _Bucket] = OrderedDict()
        self.dropped = 0
        """Events dropped by the rate limit."""

    def allow(self, about: EventSubject, now: float) -> bool:
        """Return True if the object may have one more Event now, and count that Event."""
        bucket = self._buckets.pop(about, None) or _Bucket(BURST, now)
        bucket.tokens = min(BURST, bucket.tokens + max(now - bucket.at, 0.0) / REFILL_SECONDS)
        bucket.at = now
        allowed = bucket.tokens >= 1
        bucket.tokens -= 1 if allowed else 0
        self.dropped += 0 if allowed else 1
        self._buckets[about] = bucket
        _shorten(self._buckets)
        return allowed

    def find(self, event: EventContent, now: float) -> SentEvent | None:
        """Return the sent Event with this content; None if the API server no longer has one."""
        found = self._sent.get(event)
        return found if found is not None and now - found.first < REMEMBERED_SECONDS else None

    def remember(self, event: EventContent, name: str, now: float) -> None:
        """Record that an Event was created."""
        self._sent.pop(event, None)
        self._sent[event] = SentEvent(name, now, 1)
        _shorten(self._sent)

    def forget(self, event: EventContent) -> None:
        """Drop the record of an Event that the API server no longer has."""
        self._sent.pop(event, None)


def new_event(event: EventContent, name: str, node: str, now: float) -> dict[str, Any]:
    """Return the JSON of a new Event (core/v1)."""
    about, moment = event.about, rfc3339(now)
    involved = {
        "apiVersion": "v1",
        "kind": about.kind,
        "name": about.name,
        "uid": about.uid,
        **({"namespace": about.namespace} if about.namespace else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about.events_namespace},
        "involvedObject": involved,
        "reason": event.reason,
        "message": truncated(visible(event.words)),
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


def repeat_patch(count: int, now: float) -> dict[str, Any]:
    """Return the patch for an Event that happened again."""
    return {"count": count, "lastTimestamp": rfc3339(now)}


def rfc3339(moment: float) -> str:
    """Return a Unix time in RFC 3339 with whole seconds, as Kubernetes writes it."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def truncated(words: str) -> str:
    """Cut a message to MOST_MESSAGE_BYTES."""
    encoded = words.encode()
    if len(encoded) <= MOST_MESSAGE_BYTES:
        return words
    return encoded[: MOST_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"


def _shorten(book: OrderedDict[Any, Any]) -> Mapping[Any, Any]:
    while len(book) > MOST_REMEMBERED:
        book.popitem(last=False)
    return book
