"""Messages between the stand-ins: a line of JSON each way, over the socket `control` of the pipe folder."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

PIPE_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE: Final = "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPE: Final = "tmp/nvidia-mps"
DEFAULT_LOG: Final = "var/log/nvidia-mps"
LONGEST_PIPE: Final = 87
"""Bytes of the pipe folder's path; with more the names of its sockets are too long."""

Message = Mapping[str, object]


class Peer(NamedTuple):
    """The process at the other end, according to the kernel."""

    pid: int
    uid: int
    gid: int


class Link:
    """A connection over which lines of JSON go."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = connection.makefile("rb")

    def peer(self) -> Peer:
        """Return who is at the other end."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return Peer(*struct.unpack("3i", raw))

    def send(self, message: Message) -> None:
        """Send a message; what the other end no longer reads is lost."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> Message | None:
        """Wait for a message; None at the end of the connection."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        return cast("Message", json.loads(line)) if line.endswith(b"\n") else None

    def has_news(self) -> bool:
        """Return True if `receive` would not wait."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """End the connection, also for a thread that waits for a message."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()


def connect(pipe: Path) -> Link:
    """Connect to the daemon of a pipe folder. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(pipe / "control"))
    except OSError:
        connection.close()
        raise
    return Link(connection)
