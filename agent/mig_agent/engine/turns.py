"""Long computations on the event loop take turns, so that what is short is answered in between."""

from __future__ import annotations

import asyncio

_ROUNDS = 8
"""Of the event loop, between two turns: a call that has come in gets through to its answer in about so many."""


class Turns:
    """One turn at a time, first come first served. Belongs to the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def mine(self) -> None:
        """Returns when it is the caller's turn, which lasts until its next await."""
        async with self._lock:
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)
