"""A client that speaks HTTP/2 by hand (RFC 9113, RFC 7541), to send what no library would."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path

DATA, HEADERS, RST_STREAM, SETTINGS, CONTINUATION = 0, 1, 3, 4, 9
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FIRST_DYNAMIC = b"\xbe"
"""A reference of one byte to the newest entry of the table."""
_ENTRY_BYTES = 3900


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def request_headers(path: str) -> bytes:
    """A header block of a call that puts nothing into the table."""
    return b"".join(
        (
            b"\x83\x86",  # POST, http
            _literal(4, path),
            _literal(1, "localhost"),
            b"\0" + _text("te") + _text("trailers"),
            b"\0" + _text("content-type") + _text("application/grpc"),
        )
    )


def referring_headers(path: str, references: int, *, first: bool) -> bytes:
    """A header block that refers so often to a large entry of the table, which the first such block puts there."""
    entry = b"\x40" + _text("x") + _text("a" * _ENTRY_BYTES) if first else b""
    return request_headers(path) + entry + _FIRST_DYNAMIC * references


def _literal(name: int, value: str) -> bytes:
    return _number(name, 4) + _text(value)


def _text(text: str) -> bytes:
    return _number(len(text), 7) + text.encode()


def _number(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out, value = [most], value - most
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


class RawClient:
    """One connection that sends without end what it is told to, and reads, or does not."""

    def __init__(self, path: Path, *, acknowledges: bool, reads: bool = True, window: int | None = None) -> None:
        """`window` is how many bytes of each answer may be sent; None for as many as usual."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._reads = reads
        settings = b"" if window is None else b"\0\4" + window.to_bytes(4, "big")
        self._out = PREFACE + frame(SETTINGS, 0, 0, settings) + (frame(SETTINGS, ACK) if acknowledges else b"")
        self.calls = 0
        self.is_open = True

    def go_on(self, call: Callable[[int, int], bytes]) -> bool:
        """Sends, and reads, what is possible at once; whether anything was. `call` makes the n-th, on this stream."""
        busy = False
        try:
            if not self._out:
                self._out = call(self.calls, 2 * self.calls + 1)
                self.calls += 1
            with contextlib.suppress(BlockingIOError):
                sent = self._socket.send(self._out)
                self._out, busy = self._out[sent:], sent > 0
            if self._reads:
                with contextlib.suppress(BlockingIOError):
                    self.is_open = bool(self._socket.recv(65536))
        except OSError:
            self.is_open = False
        if not self.is_open:
            self._socket.close()
        return busy

    def close(self) -> None:
        """Ends it; harmless when it has ended."""
        self._socket.close()
        self.is_open = False


def flood(
    connect: Callable[[], RawClient],
    number: int,
    call: Callable[[int, int], bytes],
    seconds: float,
    enough: float = math.inf,
) -> int:
    """Send on that many connections, opened again when closed, for a time or `enough`; return the number of calls."""
    clients = [connect() for _ in range(number)]
    calls = 0
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and calls + sum(each.calls for each in clients) < enough:
            busy = False
            for place, each in enumerate(clients):
                if each.is_open:
                    busy |= each.go_on(call)
                else:
                    calls += each.calls
                    clients[place] = connect()
            if not busy:
                time.sleep(0.005)
    finally:
        for each in clients:
            each.close()
    return calls + sum(each.calls for each in clients)
