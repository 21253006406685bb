"""The web page of an agent under test: its address, its tokens, and plain requests."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from support.agent import GENEROUS_SECONDS, Agent

FLAGS = ("--web", "127.0.0.1:0")
EVENTS, USAGE = "/api/v1/events", "/api/v1/usage"


class Web:
    """A client of what is served at the setting `web`."""

    def __init__(self, agent: Agent, url: str = "") -> None:
        self._agent = agent
        self.url = url or str(agent.serving()["web"])
        self.port = int(self.url.rsplit(":", 1)[1].strip("/"))

    @property
    def token(self) -> str:
        """The token of users."""
        return self._agent.socket.with_name("agent.sock.web-token").read_text().strip()

    @property
    def admin_token(self) -> str:
        """The token of administrators."""
        return self._agent.folder.joinpath("admin.sock.web-token").read_text().strip()

    def ask(
        self, path: str, *, token: str = "", method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Makes a request exactly as given: status, headers with small letters, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GENEROUS_SECONDS)
        try:
            authorization = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request(method, path, headers={**authorization, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def begin(self, token: str) -> socket.socket:
        """Begins a stream, and reads nothing of it."""
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=GENEROUS_SECONDS)
        opened.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        return opened

    @contextmanager
    def frames(self, token: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The frames of a stream, as they come."""
        with self.begin(token) as opened, opened.makefile("rb") as lines:
            assert b" 200 " in lines.readline()
            data = (each.removeprefix(b"data: ") for each in lines if each.startswith(b"data: "))
            yield (json.loads(each) for each in data)


def first_line(opened: socket.socket) -> bytes:
    """The status line of an answer; empty where the connection was closed without one."""
    line = b""
    try:
        while not line.endswith(b"\n") and (piece := opened.recv(1)):
            line += piece
    except ConnectionResetError:
        return b""
    return line
