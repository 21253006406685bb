"""The trouble that a soak mixes into its pairs: cancelled calls, short waits, and invalid input on every layer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from calls import is_broken, stub_on

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

_ANSWER_SECONDS = 60.0
_LEAVE_WITHIN = 0.05
_LONGEST_WAIT = 0.2
_STAYS_ONE_IN = 16
"""One in this many cancelled calls sets no deadline: its lease is held for a minute though no client has it."""
_METHOD: Final = "/migagent.v1.PartitionManager/Acquire"
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS: Final = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_CHANNEL = (("grpc.use_local_subchannel_pool", 1),)
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""Statuses of a call while the agent is being ended."""


@dataclass
class Trouble:
    """Makes trouble repeatedly; collects wrong answers as texts."""

    stays: bool = True
    """True if some cancelled calls set no deadline. An agent that is killed right then may leave such a lease."""
    made: int = 0
    wrong: list[str] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(7))  # noqa: S311 -- not a secret

    async def make(self, address: str) -> None:
        """Make one call of each kind."""
        self.made += 1
        async with grpc.aio.insecure_channel(address, options=_CHANNEL) as channel:
            await asyncio.gather(
                self._leave(channel), self._wait(channel), self._messages(channel), self._bytes(address)
            )

    async def _leave(self, channel: grpc.aio.Channel) -> None:
        ttl = None if self.stays and self.draw.randrange(_STAYS_ONE_IN) == 0 else 2.0
        call = stub_on(channel).Acquire()
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(pb.AcquireRequest(request=_wanted(4000, ttl_seconds=ttl)))
            reading = asyncio.ensure_future(call.read())
            await asyncio.sleep(self.draw.uniform(0, _LEAVE_WITHIN))
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _wait(self, channel: grpc.aio.Channel) -> None:
        """Wait for a device that is never free while others work."""
        wait = self.draw.uniform(0, _LONGEST_WAIT)
        call = stub_on(channel).Acquire()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await call.write(pb.AcquireRequest(request=_wanted(79_000, wait_seconds=wait, ttl_seconds=2.0)))
                while await call.read() is not grpc.aio.EOF:
                    await call.done_writing()
        except TimeoutError:
            call.cancel()
            self.wrong.append(f"a request that waited {wait:.3f} s was not answered in {_ANSWER_SECONDS:g} s")
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # refused, which is an answer

    async def _messages(self, channel: grpc.aio.Channel) -> None:
        """Send bytes that are no message, and messages in the wrong order: each must be refused."""
        make: Any = channel.stream_stream(_METHOD)
        received = pb.AcquireRequest(received=pb.Received()).SerializeToString()
        rubbish = self.draw.randbytes(self.draw.randint(1, 200))
        for said in ([b"\xff" + rubbish], [received, rubbish], [rubbish, rubbish], []):
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    async for _ in make(iter(said)):
                        pass
            except TimeoutError:
                self.wrong.append(f"a stream that said {said!r} was not answered")
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.INVALID_ARGUMENT, *_AWAY} and not is_broken(error):
                    self.wrong.append(f"a stream that said {said!r} was answered {error.code()}: {error.details()}")

    async def _bytes(self, address: str) -> None:
        """Send bytes that are no HTTP/2, that begin like it, and frames of it that make no sense."""
        for beginning in (b"", _PREFACE, _PREFACE + _SETTINGS):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(address.removeprefix("unix://"))
                writer.write(beginning + self._frames())
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    def _frames(self) -> bytes:
        """Return frames of any kind with any content."""
        frames = b""
        for _ in range(self.draw.randint(1, 8)):
            content = self.draw.randbytes(self.draw.randint(0, 64))
            kind, flags, stream = self.draw.randrange(12), self.draw.randrange(256), self.draw.randrange(8)
            frames += len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content
        return frames


def _wanted(memory_mib: int, *, wait_seconds: float | None = None, ttl_seconds: float | None = None) -> pb.Request:
    return pb.Request(
        wants=[pb.Want(memory_bytes=memory_mib << 20)],
        request_id=uuid.uuid4().hex,
        wait_seconds=wait_seconds,
        ttl_seconds=ttl_seconds,
    )
