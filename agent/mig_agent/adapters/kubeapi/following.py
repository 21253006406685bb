"""Those who follow something at the API server, all by one watch, which stands as long as anybody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mig_agent.adapters.kubeapi.server import ApiServer
from mig_agent.adapters.kubeapi.watch import Position, Watch

_Facts = TypeVar("_Facts")


class Following:
    """What `KubeApi.follow_node` and `follow_pods` give; `close` ends it, and nothing is told any more."""

    def __init__(
        self, on_change: Callable[[Any], None], on_lost: Callable[[str], None], on_close: Callable[[Following], None]
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
        self._followers: list[Following] = []
        self.watch: Watch[_Facts] | None = None
        """None while nobody follows."""
        self.latest: _Facts | None = None
        """What was told last; None while nobody follows."""

    def follow(self, on_change: Callable[[_Facts], None], on_lost: Callable[[str], None]) -> Following:
        """One more who is told, of what is known first."""
        following = Following(on_change, on_lost, self._left)
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

    def _left(self, following: Following) -> None:
        self._followers.remove(following)
        if not self._followers and self.watch is not None:
            self.watch.close()
            self.watch = None
            self.latest = None
