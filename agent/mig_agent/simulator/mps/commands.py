"""The commands of nvidia-cuda-mps-control and their answers, word for word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mig_agent.simulator.mps.values import read_mib, read_ordinal, shown
from mig_agent.simulator.mps.wire import Peer

_FIRST_WITH_STATUS = 550
_FIRST_WITH_RIGHTS = 550
"""The first branch that checks rights: before it everybody who reaches the socket may change defaults."""
_FIRST_WITH_UUIDS = 615
MAY_NOT_QUIT = "Not enough privilege to execute quit command"
_PS_HEADER = "PID       ID    SERVER    DEVICE             NAMESPACE      COMMAND"


@dataclass(slots=True, kw_only=True)
class Settings:
    """Settings that a server takes from its daemon when it starts, or gets afterwards."""

    limits_mib: dict[int, int] = field(default_factory=dict)
    """Limits by ordinal of the device."""
    percentage: float = 100.0
    priority: int = 0

    def copy(self) -> Settings:
        """Return the settings of a server that starts now."""
        return Settings(limits_mib=dict(self.limits_mib), percentage=self.percentage, priority=self.priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    """A client in the lists."""

    pid: int
    number: int
    device: str
    """UUID of the client's GPU."""
    command: str


class ServerView(Protocol):
    """A server, as far as commands show and change it."""

    pid: int
    status: str
    settings: Settings

    def rows(self) -> Sequence[ClientRow]:
        """Return its clients."""


class Office(Protocol):
    """The daemon, as far as commands use it."""

    branch: int
    """The driver's, such as 550."""
    uid: int
    defaults: Settings
    devices: Sequence[str]
    """UUIDs of the devices in the order of their ordinals."""

    def servers(self) -> Mapping[int, ServerView]:
        """Return the running servers by pid."""

    def start_server(self, uid: int) -> None:
        """Start a server and wait until it serves or has ended."""

    def shut_down(self, server: int, *, force: bool) -> None:
        """End a server, without force after its last client."""

    def terminate(self, server: int, client: int) -> bool:
        """End a client's use of the GPU; False if the server has no such client."""

    def log(self, text: str) -> None:
        """Write a line to control.log."""


class _Refused(Exception):  # noqa: N818 -- an answer, not an error
    """Ends a command; the message is the answer."""


def answer(office: Office, peer: Peer, command: str) -> list[str]:
    """Return the lines that a command other than `quit` answers; an exit status tells nothing."""
    words = command.split()
    name = words[0] if words else ""
    run = _COMMANDS.get(name)
    if run is None or (name == "get_server_status" and office.branch < _FIRST_WITH_STATUS):
        return [f'Unknown command "{name}"']
    try:
        return run(office, peer, words[1:])
    except _Refused as refused:
        return str(refused).split("\n")


def may_quit(office: Office, peer: Peer) -> bool:
    """Return True for root and the daemon's user."""
    return peer.uid in {0, office.uid}


def _require_rights(office: Office, peer: Peer) -> None:
    if office.branch >= _FIRST_WITH_RIGHTS and not may_quit(office, peer):
        raise _Refused(
            f"Insufficient privileges for UID {peer.uid}. Control deamon settings can only be modified by the user "
            "started it or by the root user."
        )


def _word(words: Sequence[str], index: int) -> str:
    return words[index] if index < len(words) else ""


def _server(office: Office, text: str) -> ServerView:
    pid = read_ordinal(text)
    server = office.servers().get(pid)
    if server is None:
        raise _Refused(f"Server {pid} not found")
    return server


def _set_limit(office: Office, settings: Settings, words: Sequence[str]) -> list[str]:
    device, value = _word(words, 0), read_mib(_word(words, 1))
    if office.branch >= _FIRST_WITH_UUIDS and device in office.devices:
        settings.limits_mib[office.devices.index(device)] = value
    else:  # a UUID reads as device 0, and clears its limit
        settings.limits_mib[read_ordinal(device)] = value if device[:1].isdigit() else 0
    return []


def _get_limit(office: Office, settings: Settings, words: Sequence[str]) -> list[str]:
    device = _word(words, 0)
    known = office.branch >= _FIRST_WITH_UUIDS and device in office.devices
    ordinal = office.devices.index(device) if known else read_ordinal(device)
    text = shown(settings.limits_mib.get(ordinal))
    return [text] if text else []


def _set_percentage(office: Office, settings: Settings, text: str) -> list[str]:
    try:
        percentage = float(text)
    except ValueError:
        percentage = 0.0
    if 0 < percentage <= 100:  # noqa: PLR2004 -- per cent
        settings.percentage = percentage
    else:
        office.log("Invalid percentage, expected between (0.0, 100.0]")
    return [f"{settings.percentage:.1f}"]


def _servers(office: Office, _peer: Peer, _words: Sequence[str]) -> list[str]:
    return [str(pid) for pid in office.servers()]


def _clients(office: Office, _peer: Peer, words: Sequence[str]) -> list[str]:
    return [str(row.pid) for row in _server(office, _word(words, 0)).rows()]


def _device_clients(office: Office, _peer: Peer, _words: Sequence[str]) -> list[str]:
    rows = [row for server in office.servers().values() for row in server.rows()]
    lines = []
    for device in dict.fromkeys(row.device for row in rows):
        lines += [device, *(str(row.pid) for row in rows if row.device == device)]
    return lines


def _status(office: Office, _peer: Peer, words: Sequence[str]) -> list[str]:
    return [_server(office, _word(words, 0)).status]


def _ps(office: Office, _peer: Peer, _words: Sequence[str]) -> list[str]:
    servers = office.servers()
    if not servers:
        return ["Server not found"]
    return [
        _PS_HEADER,
        *(
            f"{row.pid:<9} {row.number:<5} {pid:<9} {row.device[:22]:<18} 4026531836     {row.command}"
            for pid, server in servers.items()
            for row in server.rows()
        ),
    ]


def _start_server(office: Office, peer: Peer, words: Sequence[str]) -> list[str]:
    uid = _word(words, 1)
    if _word(words, 0) != "-uid" or not uid.isdigit():
        return ["A user id (UID) is required to start a new server"]
    if int(uid) != peer.uid and peer.uid != 0:
        why = " Only the root user may start server for another user." if office.branch >= _FIRST_WITH_RIGHTS else ""
        return [f"Insufficient privileges for UID {peer.uid}{'.' if why else ''}{why}"]
    office.start_server(int(uid))
    return []


def _shut_down(office: Office, _peer: Peer, words: Sequence[str]) -> list[str]:
    office.shut_down(_server(office, _word(words, 0)).pid, force=_word(words, 1) == "-f")
    return []


def _terminate(office: Office, _peer: Peer, words: Sequence[str]) -> list[str]:
    server = read_ordinal(_word(words, 0))
    if server not in office.servers():
        return [f"Server {server} not found", f"Server {server} not found!", "1"]
    return ["0" if office.terminate(server, read_ordinal(_word(words, 1))) else "1"]


def _changed_default(
    change: Callable[[Office, Settings, Sequence[str]], list[str]],
) -> Callable[[Office, Peer, Sequence[str]], list[str]]:
    def run(office: Office, peer: Peer, words: Sequence[str]) -> list[str]:
        _require_rights(office, peer)
        return change(office, office.defaults, words)

    return run


def _set_priority(_office: Office, settings: Settings, words: Sequence[str]) -> list[str]:
    settings.priority = read_ordinal(_word(words, 0))
    return []


_COMMANDS: Mapping[str, Callable[[Office, Peer, Sequence[str]], list[str]]] = {
    "get_server_list": _servers,
    "get_client_list": _clients,
    "get_device_client_list": _device_clients,
    "get_server_status": _status,
    "ps": _ps,
    "start_server": _start_server,
    "shutdown_server": _shut_down,
    "terminate_client": _terminate,
    "get_default_active_thread_percentage": lambda office, _peer, _words: [f"{office.defaults.percentage:.1f}"],
    "set_default_active_thread_percentage": _changed_default(
        lambda office, settings, words: _set_percentage(office, settings, _word(words, 0))
    ),
    "get_active_thread_percentage": lambda office, _peer, words: [
        f"{_server(office, _word(words, 0)).settings.percentage:.1f}"
    ],
    "set_active_thread_percentage": lambda office, _peer, words: _set_percentage(
        office, _server(office, _word(words, 0)).settings, _word(words, 1)
    ),
    "get_default_device_pinned_mem_limit": lambda office, _peer, words: _get_limit(office, office.defaults, words),
    "set_default_device_pinned_mem_limit": _changed_default(_set_limit),
    "get_device_pinned_mem_limit": lambda office, _peer, words: _get_limit(
        office, _server(office, _word(words, 0)).settings, words[1:]
    ),
    "set_device_pinned_mem_limit": lambda office, _peer, words: _set_limit(
        office, _server(office, _word(words, 0)).settings, words[1:]
    ),
    "get_default_client_priority": lambda office, _peer, _words: [str(office.defaults.priority)],
    "set_default_client_priority": _changed_default(_set_priority),
}
