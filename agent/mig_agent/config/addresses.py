"""Addresses that the agent listens on: a Unix socket's path, or a TCP host and port."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown

_LONGEST_SOCKET_PATH = 107
"""sun_path of unix(7) has 108 bytes, with the closing zero."""
_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[0-9A-Za-z._-]+):(?P<port>[0-9]{1,5})", re.ASCII)
_MOST_PORT = 65535
_HINT = "write unix:///path/to/socket, or HOST:PORT for TCP"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket; the path is absolute."""

    path: Path

    @property
    def target(self) -> str:
        """The address as gRPC takes it, without `unix://`, whose slashes would count for the path's limited length."""
        return f"unix:{self.path}"

    def __str__(self) -> str:
        """Return the address as people write it."""
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port; an IPv6 host keeps its brackets. Port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return the address as gRPC and people write it."""
        return f"{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Parse an address that the agent listens on. Raises UsageError.

    `unix:///run/mig-agent/mig-agent.sock`, `unix:agent.sock`, `0.0.0.0:7400` or `[::]:7400`.
    """
    stripped = text.strip()
    if stripped.startswith(("unix-abstract:", "unix:@", "unix://@")):
        raise UsageError(
            f"cannot listen on {shown(stripped)}: an abstract socket has no permissions, anybody could connect",
            "write unix:///path/to/socket",
        )
    if stripped.startswith("unix:"):
        rest = stripped.removeprefix("unix:")
        return _unix(rest.removeprefix("//"), stripped)
    if stripped.startswith("/"):
        return _unix(stripped, stripped)
    return parse_tcp_address(stripped)


def parse_tcp_address(text: str) -> TcpAddress:
    """Parse `127.0.0.1:7481`, `[::1]:7481` or `tcp://0.0.0.0:7400`. Raises UsageError."""
    stripped = text.strip().removeprefix("tcp://")
    match = _HOST_AND_PORT.fullmatch(stripped)
    if match is None:
        raise UsageError(f"cannot listen on {shown(stripped) or 'an empty text'}", _HINT)
    port = int(match["port"])
    if port > _MOST_PORT:
        raise UsageError(f"cannot listen on {shown(stripped)}: ports go up to {_MOST_PORT}", _HINT)
    return TcpAddress(match["host"], port)


def _unix(path: str, text: str) -> UnixAddress:
    if not path or path.endswith("/") or "\0" in path:
        raise UsageError(f"cannot listen on {shown(text)}: it names no file", _HINT)
    absolute = Path(path).absolute()
    if len(bytes(absolute)) > _LONGEST_SOCKET_PATH:
        raise UsageError(
            f"cannot listen on {absolute}: the path has {len(bytes(absolute))} bytes, a socket's at most "
            f"{_LONGEST_SOCKET_PATH}",
            "choose a shorter one",
        )
    return UnixAddress(absolute)
