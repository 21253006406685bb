"""Follows one node at the API server, in a thread of its own: a list, then a watch from where the list stood.

A watch that ends is taken up where it stood; what the server no longer remembers (410) is listed again. A server that
does not answer is asked again and again, with pauses that grow, and whoever follows is told that touch is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from mig_agent.adapters.kubeapi.facts import Json, KubeApiError, NodeFacts, node_facts
from mig_agent.adapters.kubeapi.server import ApiServer, pieces_of

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


def pause_seconds(failures: int, chance: float) -> float:
    """How long to wait after so many failures in a row; `chance` from 0 to 1 spreads the nodes of a cluster."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE_SECONDS)
    return longest * (0.5 + 0.5 * chance)


class Position:
    """Where a watch stands, moved by what the server says. Pure."""

    def __init__(self) -> None:
        self.resource_version = ""
        """Empty: the node has to be listed."""

    def listed(self, nodes: Json) -> NodeFacts | None:
        """The node in the answer to a list; None where it is not there."""
        self.resource_version = nodes["metadata"]["resourceVersion"]
        found = nodes.get("items") or ()
        return node_facts(found[0]) if found else None

    def moved(self, change: Json) -> NodeFacts | None:
        """The node after one line of a watch; None where the line says nothing of it.

        Raises KubeApiError where the server ends the watch with an error; the node is listed again then.
        """
        kind, thing = change["type"], change["object"]
        if kind == "ERROR":
            self.resource_version = ""
            code = int(thing.get("code") or 0)
            raise KubeApiError(f"cannot watch on: {thing.get('message', 'no reason given')} ({code})", code)
        self.resource_version = thing["metadata"]["resourceVersion"]
        return node_facts(thing) if kind in {"ADDED", "MODIFIED"} else None


class Following:
    """What `KubeApi.follow_node` gives; `close` ends it, and nothing is told any more."""

    def __init__(
        self, on_change: Callable[[NodeFacts], None], on_lost: Callable[[str], None], on_close: Callable[[], None]
    ) -> None:
        self._on_change = on_change
        self._on_lost = on_lost
        self._on_close = on_close
        self._open = True

    def change(self, facts: NodeFacts) -> None:
        """Tells of the node."""
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
            self._on_close()


class NodeWatch:
    """Belongs to the event loop, where both callbacks are called; its thread is daemonic."""

    def __init__(
        self,
        server: ApiServer,
        node: str,
        on_change: Callable[[NodeFacts], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._server = server
        self._node = node
        self._on_change = on_change
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._mutex = threading.Lock()
        self._answer: Any = None
        self._thread = threading.Thread(target=self._run, name="watch-node", daemon=True)
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
        position, failures = Position(), 0
        while not self._closed.is_set():
            try:
                if not position.resource_version:
                    self._list(position)
                began = time.monotonic()
                heard = self._watch(position)
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

    def _list(self, position: Position) -> None:
        nodes = self._server.read("/api/v1/nodes", {"fieldSelector": f"metadata.name={self._node}"})
        try:
            facts = position.listed(nodes)
        except (KeyError, TypeError) as error:
            raise KubeApiError(f"cannot read node {self._node}: the answer is no list of nodes") from error
        if facts is not None:
            self._tell(self._on_change, facts)
        else:
            self._tell(self._on_lost, f"cannot see node {self._node}: the API server does not have it")

    def _watch(self, position: Position) -> bool:
        """Until the server ends the watch; whether it said anything."""
        heard = False
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={self._node}",
            "resourceVersion": position.resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*WATCH_SECONDS)),  # noqa: S311 -- no secret
        }
        with self._server.open_watch("/api/v1/nodes", query, SILENCE_SECONDS) as answer:
            with self._mutex:
                self._answer = answer
            try:
                for line in lines(pieces_of(answer)):
                    if self._closed.is_set():
                        return True
                    self._take(position, line)
                    heard = True
            finally:
                with self._mutex:
                    self._answer = None
        return heard

    def _take(self, position: Position, line: bytes) -> None:
        try:
            facts = position.moved(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise KubeApiError(f"cannot watch node {self._node}: a line of it is no change of a node") from error
        if facts is not None:
            self._tell(self._on_change, facts)

    def _tell(self, callback: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback, what)


def lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines from pieces that end anywhere; what follows the last newline is dropped. Raises KubeApiError."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            raise KubeApiError("cannot watch on: a line of the answer does not come to an end")
        yield from (each for each in whole if each.strip())
