"""The agent's address: as people write it, from the environment, or the default socket."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mig_agent.client.errors import NoAgent
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown

DEFAULT_ADDRESS = "unix:///run/mig-agent/mig-agent.sock"
ADDRESS_VARIABLE = "MIG_AGENT_ADDRESS"
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""Where the kernel tells the id of its present run, which containers see as well."""
ADMIN_SOCKET = "admin.sock"
"""File name of the administrators' socket, beside the users' one."""

_TCP = re.compile(
    r"(?:(?:dns|ipv4|ipv6|tcp):(?://[^/]*/|///?)?)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
_MOST_PORT = 65535
_LONGEST_SOCKET_PATH = 107
"""Limit of `sun_path` in bytes, without its terminator."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address to connect to: a Unix socket, or host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        return f"unix:{self.path}" if self.path is not None else f"dns:///{self.host}:{self.port}"

    def __str__(self) -> str:
        """Return the address as people write it."""
        return f"unix://{self.path}" if self.path is not None else f"{self.host}:{self.port}"

    @property
    def for_admin(self) -> Address:
        """The administrators' socket beside this one if it may be opened; otherwise this one."""
        if self.path is None or self.path.name == ADMIN_SOCKET:
            return self
        beside = self.path.with_name(ADMIN_SOCKET)
        return Address(beside) if os.access(beside, os.R_OK | os.W_OK) else self


def resolve(address: str | None = None, environment: Mapping[str, str] = os.environ) -> Address:
    """Return the given address, else MIG_AGENT_ADDRESS of the environment, else the default. Raises UsageError."""
    return parse_address(address or environment.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS)


def parse_address(text: str) -> Address:
    """Parse `unix:///run/x.sock`, `unix:x.sock`, `/run/x.sock` or `host:port`. Raises UsageError."""
    stripped = text.strip()
    if stripped.startswith("unix:"):
        return _unix(stripped.removeprefix("unix:"), stripped)
    if stripped.startswith(("/", "./", "../")):
        return _unix(stripped, stripped)
    match = _TCP.fullmatch(stripped)
    if match is None or not 0 < int(match["port"]) <= _MOST_PORT:
        raise UsageError(
            f"cannot take {shown(stripped)} as the agent's address",
            f"write {DEFAULT_ADDRESS}, the path of a socket, or host:port",
        )
    return Address(host=match["host"], port=int(match["port"]))


def addresses_by_node(endpoint_slices: Iterable[Mapping[str, Any]], port: str = "grpc") -> dict[str, str]:
    """Return the addresses of ready agents by node, from the EndpointSlices of their headless Service, as JSON.

    `port` is the port's name in the Service; in the chart's it is `grpc`.
    """
    return {
        endpoint["nodeName"]: f"{_bracketed(endpoint['addresses'][0])}:{each['port']}"
        for piece in endpoint_slices
        for each in piece.get("ports") or ()
        if each.get("name") == port
        for endpoint in piece.get("endpoints") or ()
        # A missing condition counts as ready, as the API defines it.
        if endpoint.get("nodeName") and (endpoint.get("conditions") or {}).get("ready") is not False
    }


def is_on_this_machine(boot_id: str) -> bool:
    """Return True if an agent with this boot id (`Status.boot_id`) runs on this machine, in a container or not."""
    try:
        here = BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return False
    return bool(boot_id) and boot_id == here


def diagnose(address: Address) -> NoAgent | None:
    """Return why a Unix socket does not answer; None if it accepts connections, or for another kind of address."""
    if address.path is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(1)
            probe.connect(str(address.path))
        except OSError as error:
            why, hint = _why(error, address.path)
            return NoAgent(f"cannot reach the agent at {address}: {why}", hint)
    return None


def _why(error: OSError, path: Path) -> tuple[str, str]:
    """Return what a failed connection means, and a hint."""
    elsewhere = (
        f"ask the administrator (`systemctl status mig-agent`), or say where it is with --address or {ADDRESS_VARIABLE}"
    )
    match error:
        case TimeoutError():
            return "it does not take connections", "look at its log; it may hang"
        case FileNotFoundError():
            return "there is no such socket", elsewhere
        case ConnectionRefusedError():
            return ("nobody listens there" if path.is_socket() else "that is not a socket"), elsewhere
        case PermissionError():
            return "permission denied", f"it belongs to {_owner(path)}: become a member of that group, or use sudo"
        case _:
            return error.strerror or str(error), elsewhere


def _unix(path: str, whole: str) -> Address:
    if path.startswith("//"):
        path = path.removeprefix("//")
        if not path.startswith("/"):
            raise UsageError(f"cannot take {shown(whole)} as the agent's address", f"write unix:///{shown(path)}")
    if not path or "\0" in path:
        raise UsageError("cannot take an address without a path", f"write it as in {DEFAULT_ADDRESS}")
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise UsageError(
            f"cannot use the socket {shown(path)}: its path is longer than {_LONGEST_SOCKET_PATH} bytes",
            "use a shorter path, or a symbolic link to its folder",
        )
    return Address(Path(path))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _owner(path: Path) -> str:
    try:
        return f"{path.owner()}:{path.group()}"
    except (OSError, KeyError):
        return "somebody else"
