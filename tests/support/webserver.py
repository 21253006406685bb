"""A web server that answers as a test tells it to, hangs, trickles or talks nonsense; it knows nothing of Kubernetes.

What the agent does with a real API server is tested on one, in `tests/e2e`.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    method: str
    path: str
    """With its query."""
    body: Any
    """From its JSON; None where there is none."""
    headers: dict[str, str]
    """Names in lower case."""


@dataclass(frozen=True, slots=True)
class Says:
    """An answer."""

    status: int = 200
    body: bytes = b"{}"
    pieces: Iterator[bytes] | None = None
    """Sent one by one in place of `body`; the connection ends after them, without saying how long all of it is."""


def json_of(value: object, status: int = 200) -> Says:
    """An answer in JSON."""
    return Says(status, json.dumps(value).encode())


@dataclass(slots=True)
class WebServer:
    """What a test has of it."""

    address: str
    answer: Callable[[Asked], Says]
    """Called for each request, in a thread of its own; may block until the test's end."""
    asked: list[Asked] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the test ends, so that what blocks comes to its end."""

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig that leads here."""
        path = folder / "kubeconfig.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": {"server": self.address}}],
                    "users": [{"name": "agent", "user": {"token": "a-token"}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "agent"}}],
                    "current-context": "here",
                }
            )
        )
        return path


@contextmanager
def web_server(
    answer: Callable[[Asked], Says] = lambda _asked: Says(), tls: ssl.SSLContext | None = None
) -> Iterator[WebServer]:
    """Runs one on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path, json.loads(text) if text else None, headers)
            server.asked.append(asked)
            says = server.answer(asked)
            try:
                self._say(says)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _say(self, says: Says) -> None:
            if says.pieces is not None:
                self.protocol_version = "HTTP/1.1"
            self.send_response(says.status)
            if says.pieces is None:
                self.send_header("Content-Length", str(len(says.body)))
                self.end_headers()
                self.wfile.write(says.body)
                return
            # As an API server does it: clients read what ends with the connection in pieces of 64 KiB.
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Connection", "close")
            self.end_headers()
            for piece in chain(filter(None, says.pieces), (b"",)):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.close_connection = True

        do_GET = do_PATCH = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 -- names of http.server

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its name there
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        http.socket = tls.wrap_socket(http.socket, server_side=True)
    http.daemon_threads = True
    http.block_on_close = False
    server = WebServer(f"http{'s' if tls else ''}://127.0.0.1:{http.server_address[1]}", answer)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, name="web-server")
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        http.shutdown()
        http.server_close()
        thread.join()
