"""Data of the web page, made on the event loop and in one thread while somebody looks, and read from any thread.

However many look: a status is taken once a second at most, and encoded once for each role.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError as Cancelled
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from mig_agent import __version__
from mig_agent.adapters.threads import CallThread
from mig_agent.client import decode, to_json
from mig_agent.client.slice_maps import slice_maps
from mig_agent.client.types import Status
from mig_agent.core.accounting import By
from mig_agent.core.slicemap_svg import render_legend, render_tile
from mig_agent.daemon.web.access import READERS
from mig_agent.engine.callers import Role
from mig_agent.engine.manager import Manager
from mig_agent.engine.results import Published
from mig_agent.frontends.grpc import encode
from mig_agent.migctl.wait_words import basis, blocked_by, start_interval
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

LEAST_SECONDS = 1.0
"""The pause between two frames, at least."""
MOST_SECONDS = 5.0
"""The same at most: ages, estimates and deadlines change though nothing happens."""
_LOOK_SECONDS = 0.2
SILENCE_SECONDS = 10.0
"""Seconds without a frame after which a reader gets a sign of life."""
MOST_STREAMS: Final[Mapping[Role, int]] = {Role.USER: 48, Role.ADMIN: 16}
"""Limit of concurrent readers: users cannot keep administrators out."""
MOST_LEASES = 500
MOST_WAITING = 100
MOST_BLOCKERS = 16
"""Limits of what one frame lists: it stays below a MiB on any node."""
ACCOUNT_SECONDS = 7 * 86400.0
_ACCOUNT_AGE_SECONDS = 20.0
"""Time for which an account is used again: it reads the ledger."""
_ANSWER_SECONDS = 8.0
"""Time limit of what a request waits for from the event loop."""
STILL_HERE: Final = b": still here\n\n"

_log = structlog.get_logger(__name__)


class Feed:
    """The frames of both roles. `stream`, `account` and `close` may be called from any thread."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._loop = asyncio.get_running_loop()
        self._thread = CallThread("web-page")
        self._wanted = asyncio.Event()
        self._changed = threading.Condition()
        """Guards what follows; notified of new frames."""
        self._frames: dict[Role, tuple[int, bytes]] = {}
        self._readers: Counter[Role] = Counter()
        self._generation = 0
        """Number of times that all streams were ended."""
        self._accounts: dict[Role, tuple[float, bytes]] = {}
        self._reading = threading.Lock()

    async def keep(self) -> None:
        """Make frames while somebody reads them, until cancelled."""
        number = 0
        while True:
            await self._wanted.wait()
            with self._changed:
                roles = [role for role, count in self._readers.items() if count > 0]
                if not roles:  # whoever comes next gets no old frame
                    self._frames.clear()
                    self._wanted.clear()
                    continue
            number += 1
            published = self._manager.published
            try:
                await self._publish(number, roles)
            except Exception:  # noqa: BLE001 -- the page must not end with one frame
                _log.exception("cannot make what the web page shows")
            await self._until_due(published)

    async def _publish(self, number: int, roles: list[Role]) -> None:
        await self._manager.refresh_estimates()
        snapshot = self._manager.snapshot
        for role in roles:
            message = encode.status(snapshot, __version__, READERS[role])
            frame = await self._thread.run(partial(_frame, message, number, snapshot.at))
            with self._changed:
                self._frames[role] = (number, frame)
                self._changed.notify_all()

    async def _until_due(self, published: Published) -> None:
        began = time.monotonic()
        await asyncio.sleep(LEAST_SECONDS)
        while time.monotonic() - began < MOST_SECONDS and self._manager.published is published:
            with self._changed:
                if any(count > 0 and role not in self._frames for role, count in self._readers.items()):
                    return
            await asyncio.sleep(_LOOK_SECONDS)

    def stream(self, role: Role) -> Stream | None:
        """Return the frames for a new reader; None at the limit of readers."""
        with self._changed:
            if self._readers[role] >= MOST_STREAMS[role]:
                return None
            self._readers[role] += 1
            stream = Stream(self, role, self._generation)
        self._loop.call_soon_threadsafe(self._wanted.set)
        return stream

    def left(self, role: Role) -> None:
        """Count a reader less."""
        with self._changed:
            self._readers[role] -= 1

    def next_frame(self, role: Role, after: int, generation: int) -> tuple[int, bytes] | None:
        """Wait for a frame after the one of this number; None once streams of this generation have ended."""

        def is_due() -> bool:
            return self._generation != generation or self._frames.get(role, (0, b""))[0] > after

        with self._changed:
            due = self._changed.wait_for(is_due, SILENCE_SECONDS)
            if self._generation != generation:
                return None
            return self._frames[role] if due else (after, STILL_HERE)

    def end_streams(self) -> None:
        """End all streams that are open now."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def account(self, role: Role) -> bytes:
        """Return what was leased and used in the last days, as JSON. Raises RefusedError, and TimeoutError."""
        with self._reading:
            known = self._accounts.get(role)
            now = time.monotonic()
            if known is None or now - known[0] > _ACCOUNT_AGE_SECONDS:
                asked = asyncio.run_coroutine_threadsafe(self._account(role), self._loop)
                try:
                    known = (now, asked.result(_ANSWER_SECONDS))
                except Cancelled as error:
                    raise TimeoutError from error
                finally:
                    asked.cancel()
                self._accounts[role] = known
            return known[1]

    async def _account(self, role: Role) -> bytes:
        since, found = self._manager.now - ACCOUNT_SECONDS, {}
        for by in (By.USER, By.NAME):
            account = await self._manager.history.account(since, None, by, READERS[role])
            message = encode.account(account, has_since=True)
            found[by.value] = to_json.account(decode.account(message))
        return json.dumps(found, separators=(",", ":")).encode()


class Stream:
    """One reader's frames, from the newest on; older ones are left out where the reader is slow."""

    def __init__(self, feed: Feed, role: Role, generation: int) -> None:
        self._feed: Feed | None = feed
        self._role = role
        self._generation = generation

    def __iter__(self) -> Iterator[bytes]:
        number = 0
        while self._feed is not None:
            found = self._feed.next_frame(self._role, number, self._generation)
            if found is None:
                return
            number, frame = found
            yield frame

    def close(self) -> None:
        """Give the reader's place to others."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.left(self._role)


def _frame(message: pb.StatusResponse, number: int, at: float) -> bytes:
    """Return an event of a stream (text/event-stream) with the node as JSON and as pictures."""
    node = decode.status(message)
    maps = slice_maps(node)
    waiting = node.queue[:MOST_WAITING]
    data: dict[str, object] = {
        "at": to_json.moment(at),
        "status": to_json.encode(_shortened(node)),
        "counts": {"gpus": len(node.gpus), "leases": len(node.leases), "waiting": len(node.queue)},
        "maps": [render_tile(each) for each in maps],
        "legend": render_legend(maps),
        "waits": [
            {
                "start": start_interval(each.estimate),
                "basis": "" if each.estimate is None else basis(each.estimate),
                "blocked": blocked_by(each.blockers, brief=True),
                "blockers": [blocked_by([one], brief=True) for one in each.blockers[:MOST_BLOCKERS]],
            }
            for each in waiting
        ],
    }
    words = json.dumps(data, separators=(",", ":"))
    return f"id: {number}\nevent: status\ndata: {words}\n\n".encode()


def _shortened(node: Status) -> Status:
    """Return what a page lists of a status: instances are in the map, and long lists are cut."""
    return replace(
        node,
        gpus=tuple(replace(each, instances=()) for each in node.gpus),
        leases=node.leases[:MOST_LEASES],
        queue=tuple(replace(each, blockers=()) for each in node.queue[:MOST_WAITING]),
    )
