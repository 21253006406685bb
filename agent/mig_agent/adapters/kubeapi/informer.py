"""An informer for the pods of this node: a list, then a watch of changes, begun again whenever it breaks."""

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
"""After so long, by chance, the server ends a watch and we take it up again. So one that died silently is found out: a
server sends nothing, bookmarks neither, while nothing changes (seen with 1.36.3)."""
SILENCE_SECONDS: Final = 170.0
"""Without a byte for so long, a watch is dead."""
USEFUL_SECONDS: Final = 5.0
"""A watch that ended sooner, without a word, is not simply taken up again: there is a pause before."""
FIRST_PAUSE_SECONDS: Final = 0.3
LONGEST_PAUSE_SECONDS: Final = 20.0
_GONE: Final = 410
_MOST_LINE_BYTES: Final = 8 << 20
_MOST_LIST_BYTES: Final = 64 << 20
"""Of the pods of one node: some hundreds, of usually 10 to 30 KiB."""

_Facts = TypeVar("_Facts")


def pause_seconds(failures: int, chance: float) -> float:
    """How long to wait after so many failures in a row; `chance` from 0 to 1 spreads the nodes of a cluster."""
    return Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).pause(failures, chance)


class Position(ABC, Generic[_Facts]):
    """Where a watch stands, and what of it is known, moved by what the server says. Pure."""

    path: str
    """`/api/v1/nodes`."""
    what: str
    """What is followed, for messages: `node n1`."""
    selector: str
    """Which objects of that kind, a field selector."""
    listing: Mapping[str, str] = MappingProxyType({})
    """What else a list is asked with."""

    def __init__(self) -> None:
        self.resource_version = ""
        """Empty: the objects have to be listed."""

    def listed(self, answer: Json) -> _Facts | None:
        """What is to be told of the answer to a list; None where it has nothing of what is followed."""
        self.resource_version = answer["metadata"]["resourceVersion"]
        return self._listed(answer.get("items") or ())

    def moved(self, change: Json) -> _Facts | None:
        """What is to be told after one line of a watch; None where the line says nothing.

        Raises KubeApiError where the server ends the watch with an error; all is listed again then.
        """
        kind, thing = change["type"], change["object"]
        if kind == "ERROR":
            self.resource_version = ""
            code = int(thing.get("code") or 0)
            raise KubeApiError(f"cannot watch on: {thing.get('message', 'no reason given')} ({code})", code)
        self.resource_version = thing["metadata"]["resourceVersion"]
        return None if kind == "BOOKMARK" else self._moved(thing, is_there=kind != "DELETED")

    @abstractmethod
    def _listed(self, items: Sequence[Json]) -> _Facts | None: ...

    @abstractmethod
    def _moved(self, thing: Json, *, is_there: bool) -> _Facts | None: ...


class NodePosition(Position[NodeFacts]):
    """Of one node; one that is deleted is told of no more."""

    path = "/api/v1/nodes"

    def __init__(self, node: str) -> None:
        super().__init__()
        self.what = f"node {node}"
        self.selector = f"metadata.name={node}"

    def _listed(self, items: Sequence[Json]) -> NodeFacts | None:
        return node_facts(items[0]) if items else None

    def _moved(self, thing: Json, *, is_there: bool) -> NodeFacts | None:
        return node_facts(thing) if is_there else None


class PodsPosition(Position[Mapping[PodName, PodFacts]]):
    """Of the pods that are bound to one node: all of them, whenever one changes."""

    path = "/api/v1/pods"
    # What the API server has in its memory, by its index of nodes, as kubelets ask: etcd is not looked through.
    listing = MappingProxyType({"resourceVersion": "0"})

    def __init__(self, node: str) -> None:
        super().__init__()
        self.what = f"the pods of node {node}"
        self.selector = f"spec.nodeName={node}"
        self._pods: dict[PodName, PodFacts] = {}

    def _listed(self, items: Sequence[Json]) -> Mapping[PodName, PodFacts]:
        self._pods = {(facts.namespace, facts.name): facts for facts in map(pod_facts, items)}
        return self._picture()

    def _moved(self, thing: Json, *, is_there: bool) -> Mapping[PodName, PodFacts]:
        facts = pod_facts(thing)
        name = (facts.namespace, facts.name)
        if is_there:
            self._pods[name] = facts
        else:
            self._pods.pop(name, None)
        return self._picture()

    def _picture(self) -> Mapping[PodName, PodFacts]:
        return MappingProxyType(self._pods.copy())


class Watch(Generic[_Facts]):
    """Belongs to the event loop, where both callbacks are called; its thread is daemonic."""

    def __init__(
        self,
        server: ApiServer,
        position: Position[_Facts],
        on_change: Callable[[_Facts], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._server = server
        self._position = position
        self._on_change = on_change
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._mutex = threading.Lock()
        self._answer: Any = None
        name = f"watch-{position.path.rpartition('/')[2]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; does not wait for the thread, which ends by itself."""
        self._closed.set()
        with self._mutex, contextlib.suppress(Exception):
            if self._answer is not None:
                self._answer.shutdown()  # wakes the thread, which reads

    def join(self, seconds: float) -> bool:
        """Waits for the thread; whether it has ended. For tests."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        position, failures = self._position, 0
        while not self._closed.is_set():
            try:
                if not position.resource_version:
                    self._list()
                began = time.monotonic()
                heard = self._watch()
                useful = heard or time.monotonic() - began > USEFUL_SECONDS
                failures = 0 if useful else failures + 1
            except KubeApiError as error:
                if self._closed.is_set():
                    return
                failures += 1
                position.resource_version = ""
                if error.status == _GONE and failures == 1:
                    continue  # it was only too long ago
                self._tell(self._on_lost, error.words)
            if failures:
                self._closed.wait(pause_seconds(failures, random.random()))  # noqa: S311 -- no secret

    def _list(self) -> None:
        position = self._position
        query = {"fieldSelector": position.selector, **position.listing}
        answer = self._server.read(position.path, query, most_bytes=_MOST_LIST_BYTES)
        try:
            facts = position.listed(answer)
        except (KeyError, TypeError) as error:
            raise KubeApiError(f"cannot read {position.what}: the answer is no list of them") from error
        if facts is not None:
            self._tell(self._on_change, facts)
        else:
            self._tell(self._on_lost, f"cannot see {position.what}: the API server does not have it")

    def _watch(self) -> bool:
        """Until the server ends the watch; whether it said anything."""
        position = self._position
        heard = False
        query = {
            "watch": "true",
            "fieldSelector": position.selector,
            "resourceVersion": position.resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*WATCH_SECONDS)),  # noqa: S311 -- no secret
        }
        with self._server.open_watch(position.path, query, SILENCE_SECONDS) as answer:
            with self._mutex:
                self._answer = answer
            try:
                if self._closed.is_set():
                    return False  # since before this could be woken: the server may say nothing for long
                for line in lines(pieces_of(answer)):
                    if self._closed.is_set():
                        return True
                    self._take(line)
                    heard = True
            finally:
                with self._mutex:
                    self._answer = None
        return heard

    def _take(self, line: bytes) -> None:
        try:
            facts = self._position.moved(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            what = self._position.what
            raise KubeApiError(f"cannot watch {what}: a line of it is no change that can be understood") from error
        if facts is not None:
            self._tell(self._on_change, facts)

    def _tell(self, callback: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._deliver, callback, what)

    def _deliver(self, callback: Callable[[Any], None], what: object) -> None:
        """On the loop: what was on its way when it was closed must not be taken for another watch's."""
        if not self._closed.is_set():
            callback(what)


def lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines from pieces that end anywhere; what follows the last newline is dropped. Raises KubeApiError."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            raise KubeApiError("cannot watch on: a line of the answer does not come to an end")
        yield from (each for each in whole if each.strip())


class PodInformer:
    """What `KubeClient.follow_node` and `follow_pods` give; `close` ends it, and nothing is told any more."""

    def __init__(
        self, on_change: Callable[[Any], None], on_lost: Callable[[str], None], on_close: Callable[[PodInformer], None]
    ) -> None:
        self._on_change = on_change
        self._on_lost = on_lost
        self._on_close = on_close
        self._open = True

    def change(self, facts: object) -> None:
        """Tells of what is followed."""
        if self._open:
            self._on_change(facts)

    def lost(self, words: str) -> None:
        """Tells that the API server is out of touch."""
        if self._open:
            self._on_lost(words)

    def close(self) -> None:
        """No more calls, from this moment on."""
        if self._open:
            self._open = False
            self._on_close(self)


class Followed(Generic[_Facts]):
    """Belongs to the event loop, where all callbacks are called, each on its own: one that fails fails alone."""

    def __init__(self, server: ApiServer, position: Callable[[], Position[_Facts]]) -> None:
        """`position` gives one at its beginning."""
        self._server = server
        self._position = position
        self._followers: list[PodInformer] = []
        self.watch: Watch[_Facts] | None = None
        """None while nobody follows."""
        self.latest: _Facts | None = None
        """What was told last; None while nobody follows."""

    def follow(self, on_change: Callable[[_Facts], None], on_lost: Callable[[str], None]) -> PodInformer:
        """One more who is told, of what is known first."""
        following = PodInformer(on_change, on_lost, self._left)
        self._followers.append(following)
        if self.watch is None:
            self.watch = Watch(self._server, self._position(), self._changed, self._lost)
        elif self.latest is not None:
            asyncio.get_running_loop().call_soon(following.change, self.latest)
        return following

    def close(self) -> None:
        """Nobody is told any more; does not wait."""
        for following in tuple(self._followers):
            following.close()

    def _changed(self, facts: _Facts) -> None:
        self.latest = facts
        for following in tuple(self._followers):
            asyncio.get_running_loop().call_soon(following.change, facts)

    def _lost(self, words: str) -> None:
        for following in tuple(self._followers):
            asyncio.get_running_loop().call_soon(following.lost, words)

    def _left(self, following: PodInformer) -> None:
        self._followers.remove(following)
        if not self._followers and self.watch is not None:
            self.watch.close()
            self.watch = None
            self.latest = None
