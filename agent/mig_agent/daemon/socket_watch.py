"""Watches the agent's Unix sockets: one that is removed or replaced is reported, and bound again if removed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from mig_agent.adapters.filelock import LockedError
from mig_agent.adapters.transport.relay import Relay
from mig_agent.adapters.transport.unix_sockets import OwnedSocket
from mig_agent.core.errors import ConfigError
from mig_agent.engine.startup import LEDGER_WATCH_SECONDS

Report = Callable[[str, tuple[str, ...], bool], None]
"""Called with a message, all problems of sockets at present, and True if a socket is back."""


class WatchedSocket:
    """A socket of the agent, with what is needed to bind it again."""

    def __init__(self, owned: OwnedSocket, relay: Relay, mode: int, group: str) -> None:
        self._owned = owned
        self._relay = relay
        self._mode = mode
        self._group = group
        self.problem = ""
        """Why clients cannot connect to it; empty while they can."""

    def change_access(self, mode: int, group: str) -> Callable[[], None]:
        """Give the socket other permissions, also when it is bound again; return a function that undoes it.

        Raises ConfigError if that is not possible, and then nothing has changed.
        """
        before = self._mode, self._group
        if not self.missing():
            try:
                self._owned.change_access(mode, group)
            except ConfigError:
                self._restore(*before)
                raise
        self._mode, self._group = mode, group
        return lambda: self._restore(*before)

    def _restore(self, mode: int, group: str) -> None:
        self._mode, self._group = mode, group
        with contextlib.suppress(ConfigError):
            self._owned.change_access(mode, group)

    def missing(self) -> str:
        """Return what happened to the socket as a message; empty while it is in place."""
        return self._owned.missing()

    def rebind(self) -> str:
        """Bind it again; return why that is not possible as a message, empty if it was done."""
        try:
            self._relay.listen_on(self._owned.listen_again(self._mode, self._group))
        except (ConfigError, LockedError) as error:
            return error.message
        except OSError as error:
            return f"it cannot be bound again: {error.strerror}"
        return ""


async def watch_sockets(sockets: Sequence[WatchedSocket], report: Report) -> None:
    """Check the sockets regularly until cancelled; report each problem once."""
    while True:
        await asyncio.sleep(LEDGER_WATCH_SECONDS)
        for each in sockets:
            _check(each, sockets, report)


def _check(watched: WatchedSocket, sockets: Sequence[WatchedSocket], report: Report) -> None:
    missing = watched.missing()
    if not missing:
        if watched.problem:
            former, watched.problem = watched.problem, ""
            report(f"it is in its place again; {former}", _problems(sockets), True)
        return
    why = "it is left alone" if "was replaced" in missing else watched.rebind()
    if why:
        problem = f"{missing}: {why}"
        if problem != watched.problem:
            watched.problem = problem
            report(problem, _problems(sockets), False)
        return
    watched.problem = ""
    report(f"{missing}; it was bound again, and who was connected still is", _problems(sockets), True)


def _problems(sockets: Sequence[WatchedSocket]) -> tuple[str, ...]:
    return tuple(each.problem for each in sockets if each.problem)
