"""Carries bytes between a listener and a place elsewhere: the way into and out of the node's network namespace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

_CHUNK = 65536

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Accepted = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def carrying_to(connect: Connect) -> Accepted:
    """What a listener calls for each connection that it accepts."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await connect()
            await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))
        writer.close()

    return accepted


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass  # one side is gone: the other is told by closing it
    finally:
        writer.close()
