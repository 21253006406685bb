"""Informers for this node and its pods: a list, then a watch of changes, restarted whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from mig_agent.adapters.kubeapi.objects import (
    Json,
    KubeApiError,
    NodeFacts,
    PodFacts,
    PodName,
    node_facts,
    pod_facts,
)
from mig_agent.adapters.kubeapi.transport import ApiServer, pieces_of
from mig_agent.core.backoff import Backoff

WATCH_SECONDS: Final = (90, 150)
"""Range from which the length of a watch is drawn at random; the server then ends it and the agent opens another.

This finds connections that died silently: a server sends nothing, not even bookmarks, while nothing changes (seen with
1.36.3).
"""
SILENCE_SECONDS: Final = 170.0
"""A watch without a byte for this long counts as dead."""
USEFUL_SECONDS: Final = 5.0
"""A watch that ended without an event before this age is reopened only after a pause."""
FIRST_PAUSE_SECONDS: Final = 0.3
LONGEST_PAUSE_SECONDS: Final = 20.0
_GONE: Final = 410
_MOST_LINE_BYTES: Final = 8 << 20
_MOST_LIST_BYTES: Final = 64 << 20
"""Limit of a list: the pods of one node are some hundreds, usually of 10 to 30 KiB."""

_Facts = TypeVar("_Facts")


def pause_seconds(failures: int, chance: float) -> float:
    """Return the pause after this many failures in a row; `chance` from 0 to 1 spreads the nodes of a cluster."""
    return Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).pause(failures, chance)


class WatchState(ABC, Generic[_Facts]):
    """State of one watch (resource version and known objects), updated from the server's messages. Pure."""

    path: str
    """Path of the resource: `/api/v1/nodes`."""
    what: str
    """What is watched, for messages: `node n1`."""
    selector: str
    """Field selector of the watched objects."""
    listing: Mapping[str, str] = MappingProxyType({})
    """Further query parameters of a list."""

    def __init__(self) -> None:
        self.resource_version = ""
        """Empty if the objects have to be listed."""

    def relist(self, answer: Json) -> _Facts | None:
        """Take over the answer to a list and return what to report; None if it has none of the watched objects."""
        self.resource_version = answer["metadata"]["resourceVersion"]
        return self._relist(answer.get("items") or ())

    def apply(self, change: Json) -> _Facts | None:
        """Apply one line of a watch and return what to report; None if nothing changed.

        Raises KubeApiError if the server ended the watch with an error; the objects must then be listed again.
        """
        kind, thing = change["type"], change["object"]
        if kind == "ERROR":
            self.resource_version = ""
            code = int(thing.get("code") or 0)
            raise KubeApiError(f"cannot watch on: {thing.get('message', 'no reason given')} ({code})", code)
        self.resource_version = thing["metadata"]["resourceVersion"]
        return None if kind == "BOOKMARK" else self._apply(thing, exists=kind != "DELETED")

    @abstractmethod
    def _relist(self, items: Sequence[Json]) -> _Facts | None: ...

    @abstractmethod
    def _apply(self, thing: Json, *, exists: bool) -> _Facts | None: ...


class NodeWatchState(WatchState[NodeFacts]):
    """Watch state of one node; its deletion is not reported."""

    path = "/api/v1/nodes"

    def __init__(self, node: str) -> None:
        super().__init__()
        self.what = f"node {node}"
        self.selector = f"metadata.name={node}"

    def _relist(self, items: Sequence[Json]) -> NodeFacts | None:
        return node_facts(items[0]) if items else None

    def _apply(self, thing: Json, *, exists: bool) -> NodeFacts | None:
        return node_facts(thing) if exists else None


class PodsWatchState(WatchState[Mapping[PodName, PodFacts]]):
    """Watch state of the pods bound to one node; reports all of them whenever one changes."""

    path = "/api/v1/pods"
    # Asks the API server for what it has in memory, by its index of nodes, as kubelets do: etcd is not searched.
    listing = MappingProxyType({"resourceVersion": "0"})

    def __init__(self, node: str) -> None:
        super().__init__()
        self.what = f"the pods of node {node}"
        self.selector = f"spec.nodeName={node}"
        self._pods: dict[PodName, PodFacts] = {}

    def _relist(self, items: Sequence[Json]) -> Mapping[PodName, PodFacts]:
        self._pods = {(facts.namespace, facts.name): facts for facts in map(pod_facts, items)}
        return self._snapshot()

    def _apply(self, thing: Json, *, exists: bool) -> Mapping[PodName, PodFacts]:
        facts = pod_facts(thing)
        name = (facts.namespace, facts.name)
        if exists:
            self._pods[name] = facts
        else:
            self._pods.pop(name, None)
        return self._snapshot()

    def _snapshot(self) -> Mapping[PodName, PodFacts]:
        return MappingProxyType(self._pods.copy())


class Watch(Generic[_Facts]):
    """One watch, read in a daemonic thread. Not thread-safe; use from the event loop, where both callbacks run."""

    def __init__(
        self,
        server: ApiServer,
        state: WatchState[_Facts],
        on_change: Callable[[_Facts], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._server = server
        self._state = state
        self._on_change = on_change
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._mutex = threading.Lock()
        self._answer: Any = None
        name = f"watch-{state.path.rpartition('/')[2]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the watch without waiting for its thread."""
        self._closed.set()
        with self._mutex, contextlib.suppress(Exception):
            if self._answer is not None:
                self._answer.shutdown()  # wakes the thread, which reads

    def join(self, seconds: float) -> bool:
        """Wait for the thread and return True if it has ended. For tests."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        state, failures = self._state, 0
        while not self._closed.is_set():
            try:
                if not state.resource_version:
                    self._list()
                began = time.monotonic()
                received = self._watch()
                useful = received or time.monotonic() - began > USEFUL_SECONDS
                failures = 0 if useful else failures + 1
            except KubeApiError as error:
                if self._closed.is_set():
                    return
                failures += 1
                state.resource_version = ""
                if error.status == _GONE and failures == 1:
                    continue  # the resource version was only too old
                self._report(self._on_lost, error.words)
            if failures:
                self._closed.wait(pause_seconds(failures, random.random()))  # noqa: S311 -- no secret

    def _list(self) -> None:
        state = self._state
        query = {"fieldSelector": state.selector, **state.listing}
        answer = self._server.read(state.path, query, most_bytes=_MOST_LIST_BYTES)
        try:
            facts = state.relist(answer)
        except (KeyError, TypeError) as error:
            raise KubeApiError(f"cannot read {state.what}: the answer is no list of them") from error
        if facts is not None:
            self._report(self._on_change, facts)
        else:
            self._report(self._on_lost, f"cannot see {state.what}: the API server does not have it")

    def _watch(self) -> bool:
        """Read the watch until the server ends it; return True if it sent any event."""
        state = self._state
        received = False
        query = {
            "watch": "true",
            "fieldSelector": state.selector,
            "resourceVersion": state.resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*WATCH_SECONDS)),  # noqa: S311 -- no secret
        }
        with self._server.open_watch(state.path, query, SILENCE_SECONDS) as answer:
            with self._mutex:
                self._answer = answer
            try:
                if self._closed.is_set():
                    return (
                        False  # closed before this thread could be woken: the server may send nothing for a long time
                    )
                for line in lines(pieces_of(answer)):
                    if self._closed.is_set():
                        return True
                    self._apply_line(line)
                    received = True
            finally:
                with self._mutex:
                    self._answer = None
        return received

    def _apply_line(self, line: bytes) -> None:
        try:
            facts = self._state.apply(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            what = self._state.what
            raise KubeApiError(f"cannot watch {what}: a line of it is no change that can be understood") from error
        if facts is not None:
            self._report(self._on_change, facts)

    def _report(self, callback: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no subscriber is left
            self._loop.call_soon_threadsafe(self._deliver, callback, what)

    def _deliver(self, callback: Callable[[Any], None], what: object) -> None:
        """Call the callback, unless the watch was closed meanwhile: a late report must not reach a new subscriber."""
        if not self._closed.is_set():
            callback(what)


def lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield whole lines of the pieces; what follows the last newline is dropped.

    Raises KubeApiError if a line exceeds _MOST_LINE_BYTES.
    """
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            raise KubeApiError("cannot watch on: a line of the answer does not come to an end")
        yield from (each for each in whole if each.strip())


class InformerSubscription:
    """One subscriber of `KubeClient.follow_node` or `follow_pods`; after `close` no callback is called."""

    def __init__(
        self,
        on_change: Callable[[Any], None],
        on_lost: Callable[[str], None],
        on_close: Callable[[InformerSubscription], None],
    ) -> None:
        self._on_change = on_change
        self._on_lost = on_lost
        self._on_close = on_close
        self._open = True

    def change(self, facts: object) -> None:
        """Report the watched objects to the subscriber."""
        if self._open:
            self._on_change(facts)

    def lost(self, words: str) -> None:
        """Report to the subscriber that the API server cannot be reached."""
        if self._open:
            self._on_lost(words)

    def close(self) -> None:
        """Unsubscribe: no callback is called after this returns."""
        if self._open:
            self._open = False
            self._on_close(self)


class SharedInformer(Generic[_Facts]):
    """Shares one watch among its subscribers. Not thread-safe; use from the event loop.

    Callbacks run on the event loop, each in a call of its own, so that an exception in one does not affect the others.
    """

    def __init__(self, server: ApiServer, new_state: Callable[[], WatchState[_Facts]]) -> None:
        """`new_state` returns a new watch state."""
        self._server = server
        self._new_state = new_state
        self._subscriptions: list[InformerSubscription] = []
        self.watch: Watch[_Facts] | None = None
        """None while there are no subscribers."""
        self.latest: _Facts | None = None
        """What was reported last; None while there are no subscribers."""

    def follow(self, on_change: Callable[[_Facts], None], on_lost: Callable[[str], None]) -> InformerSubscription:
        """Add a subscriber and report the known objects to it."""
        subscription = InformerSubscription(on_change, on_lost, self._unsubscribe)
        self._subscriptions.append(subscription)
        if self.watch is None:
            self.watch = Watch(self._server, self._new_state(), self._changed, self._lost)
        elif self.latest is not None:
            asyncio.get_running_loop().call_soon(subscription.change, self.latest)
        return subscription

    def close(self) -> None:
        """Close all subscriptions without waiting for the watch's thread."""
        for subscription in tuple(self._subscriptions):
            subscription.close()

    def _changed(self, facts: _Facts) -> None:
        self.latest = facts
        for subscription in tuple(self._subscriptions):
            asyncio.get_running_loop().call_soon(subscription.change, facts)

    def _lost(self, words: str) -> None:
        for subscription in tuple(self._subscriptions):
            asyncio.get_running_loop().call_soon(subscription.lost, words)

    def _unsubscribe(self, subscription: InformerSubscription) -> None:
        self._subscriptions.remove(subscription)
        if not self._subscriptions and self.watch is not None:
            self.watch.close()
            self.watch = None
            self.latest = None
