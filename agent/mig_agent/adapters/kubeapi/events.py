"""Events as `kubectl describe` shows them: which to send, which to count up, which to leave out. Pure; bounded.

An event that was told before is counted up instead of told anew, and each object gets a burst of events and then a
trickle: a cluster's etcd is shared by everybody in it.
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
"""Of a message; the API server refuses longer ones."""
MOST_REMEMBERED: Final = 1000
REMEMBERED_SECONDS: Final = 3000.0
"""An event that is older is told anew: the API server forgets events after an hour."""
BURST: Final = 20
REFILL_SECONDS: Final = 60.0
"""After the burst, one event in so long for each object."""
NODE_NAMESPACE: Final = "default"
"""Where events of objects without a namespace live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The object that an event is about."""

    kind: str
    name: str
    uid: str
    namespace: str = ""

    @property
    def events_namespace(self) -> str:
        """Where its events live."""
        return self.namespace or NODE_NAMESPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """Something to tell of an object."""

    about: About
    reason: str
    """One word in CamelCase."""
    words: str
    warning: bool


@dataclass(slots=True)
class Told:
    """An Event that the API server has."""

    name: str
    first: float
    count: int


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class EventBook:
    """What was told, and how much may still be."""

    def __init__(self) -> None:
        self._told: OrderedDict[Telling, Told] = OrderedDict()
        self._buckets: OrderedDict[About, _Bucket] = OrderedDict()
        self.left_out = 0
        """Events that were one too many."""

    def may_tell(self, about: About, now: float) -> bool:
        """Whether the object may have one more event now; counts it."""
        bucket = self._buckets.pop(about, None) or _Bucket(BURST, now)
        bucket.tokens = min(BURST, bucket.tokens + max(now - bucket.at, 0.0) / REFILL_SECONDS)
        bucket.at = now
        allowed = bucket.tokens >= 1
        bucket.tokens -= 1 if allowed else 0
        self.left_out += 0 if allowed else 1
        self._buckets[about] = bucket
        _shorten(self._buckets)
        return allowed

    def told(self, telling: Telling, now: float) -> Told | None:
        """The Event that says just this already, if the API server still has it."""
        found = self._told.get(telling)
        return found if found is not None and now - found.first < REMEMBERED_SECONDS else None

    def remember(self, telling: Telling, name: str, now: float) -> None:
        """It was told."""
        self._told.pop(telling, None)
        self._told[telling] = Told(name, now, 1)
        _shorten(self._told)

    def forget(self, telling: Telling) -> None:
        """The API server does not have it any more."""
        self._told.pop(telling, None)


def new_event(telling: Telling, name: str, node: str, now: float) -> dict[str, Any]:
    """The JSON of a new Event (core/v1)."""
    about, moment = telling.about, stamp(now)
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
        "reason": telling.reason,
        "message": shortened(visible(telling.words)),
        "type": "Warning" if telling.warning else "Normal",
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


def again(count: int, now: float) -> dict[str, Any]:
    """The patch of an Event that happened once more."""
    return {"count": count, "lastTimestamp": stamp(now)}


def stamp(moment: float) -> str:
    """A moment in RFC 3339, whole seconds, as Kubernetes writes them."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shortened(words: str) -> str:
    """So much as the API server takes."""
    encoded = words.encode()
    if len(encoded) <= MOST_MESSAGE_BYTES:
        return words
    return encoded[: MOST_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"


def _shorten(book: OrderedDict[Any, Any]) -> Mapping[Any, Any]:
    while len(book) > MOST_REMEMBERED:
        book.popitem(last=False)
    return book
