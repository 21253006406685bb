"""A service manager as far as sd_notify(3) goes: it hears what a service tells of its state."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from pathlib import Path

_MOST_BYTES = 4096
_SECONDS = 30.0


class ServiceManager:
    """Receives the states of one service."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(_SECONDS)
        self.variables = {"NOTIFY_SOCKET": str(path)}

    def close(self) -> None:
        """Hear nothing any more."""
        self._socket.close()

    def next(self) -> dict[str, str]:
        """Wait for the next message; return its assignments."""
        message = self._socket.recv(_MOST_BYTES).decode()
        return dict(line.split("=", 1) for line in message.splitlines())

    def drain(self) -> list[str]:
        """Return the messages that have come so far, unread."""
        found = []
        while select.select([self._socket], [], [], 0)[0]:
            found.append(self._socket.recv(_MOST_BYTES).decode())
        return found

    def until(self, name: str, value: str | None = None) -> dict[str, str]:
        """Wait for a message that assigns this; return all of its assignments."""
        while True:
            message = self.next()
            if name in message and value in {None, message[name]}:
                return message


@contextlib.contextmanager
def service_manager(folder: Path) -> Iterator[ServiceManager]:
    """A service manager that listens in the folder."""
    with contextlib.closing(ServiceManager(folder / "notify")) as manager:
        yield manager
