"""A small HTTP server for one WSGI application, which limits concurrent requests and the time of each.

prometheus_client's server has neither limit: each idle connection would keep a thread and a file. A connection has no
slot until its request's head has come, and little time for that; requests without a token have a few of the slots, so
that they never keep out those with one. An application that answers with a stream takes its request out of these
limits, and limits its streams itself.
"""

from __future__ import annotations

import contextlib
import io
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

MOST_AT_ONCE = 16
"""Number of requests that are answered at once."""
MOST_WITHOUT_TOKEN = 4
"""The most of these without a token, where the server knows tokens."""
SECONDS_EACH = 10.0
"""Time limit of an answer, from the end of the request's head on."""
MOST_WITHOUT_HEAD = 32
"""Number of connections whose request is still to come; a further one ends the one that has been open longest."""
SECONDS_FOR_HEAD = 5.0
"""Time limit for receiving the request line and the headers."""
_MOST_HEAD_BYTES = 1 << 15
BEGIN_STREAM = "begin-stream"
"""Key of a WSGI environment. The function there takes the request out of the limits: its answer may last, and only each
write of it has a time limit."""
_BUFFER_BYTES = 1 << 17
"""Limit of what the kernel keeps for a client that does not read: more than any answer but a stream."""
_WORDS = {
    HTTPStatus.REQUEST_URI_TOO_LONG: f"cannot take a request line of more than {_MOST_HEAD_BYTES} bytes",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"cannot take more than 100 headers or {_MOST_HEAD_BYTES} bytes",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "cannot speak this version of HTTP",
}


def _answer(status: HTTPStatus, words: str, *, body: bool = True) -> bytes:
    """Return a whole answer of the server itself."""
    content = f"{words}\n".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Server: mig-agent",
        "Content-Type: text/plain; charset=utf-8",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        f"Content-Length: {len(content)}",
    )
    return "\r\n".join((*head, "", "")).encode() + (content if body else b"")


_TOO_MANY_CONNECTIONS = _answer(
    HTTPStatus.SERVICE_UNAVAILABLE, "cannot answer: too many connections are open; try again later"
)


class _Answering(ServerHandler):
    def finish_content(self) -> None:
        """Add no `Content-Length: 0` to an answer without content: to HEAD it would be wrong."""
        if not self.headers_sent:  # type: ignore[attr-defined] # typeshed leaves out that attribute
            self.send_headers()


class _Handler(WSGIRequestHandler):
    timeout = SECONDS_EACH
    server: BoundedServer
    command = ""
    requestline = ""
    request_version = ""

    def setup(self) -> None:
        """Have writes that take too long end the answer quietly, as for a client that has disconnected."""
        super().setup()
        self.wfile.write = partial(_write, self.wfile.write)  # type: ignore[method-assign] # the server's own file, of this connection alone

    def handle(self) -> None:
        """Receive the head of one request, and answer it in a slot."""
        head = _receive_head(self.connection)
        self.connection.settimeout(self.timeout)
        received = io.BytesIO(head)
        self.rfile = received
        if len(head) > _MOST_HEAD_BYTES:
            is_line = b"\n" not in head[:_MOST_HEAD_BYTES]
            code = HTTPStatus.REQUEST_URI_TOO_LONG if is_line else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self.send_error(code)
            return
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            return
        if len(self.headers.get_all("Host", ())) > 1:
            self.send_error(HTTPStatus.BAD_REQUEST, "cannot understand a request with two headers Host")
            return
        refusal = self.server.begin_answer(self.connection, self.headers.get("Authorization", ""))
        if refusal:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, refusal)
            return
        sent: Any = self.wfile
        answering = _Answering(received, sent, self.get_stderr(), self.get_environ(), multithread=True)
        answering.request_handler = self  # type: ignore[attr-defined] # as the base class does
        answering.run(self.server.wsgi_application)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 -- as the base class has it
        """Answer in words of this server, which repeat nothing that the client has sent."""
        status = HTTPStatus(code)
        own = message if message is not None and message.startswith("cannot ") else None
        words = own or _WORDS.get(status, "cannot understand the request")
        self.wfile.write(_answer(status, words, body=self.command != "HEAD"))

    def get_environ(self) -> dict[str, Any]:
        """Add the function that begins a stream."""
        return super().get_environ() | {BEGIN_STREAM: partial(self.server.begin_stream, self.connection)}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 -- as the base class has it
        """Log nothing: reading metrics is no news."""


class BoundedServer(ThreadingMixIn, WSGIServer):
    """Serves requests in daemonic threads. Raises OSError if it cannot listen."""

    daemon_threads = True
    request_queue_size = 128
    timeout = 0.0
    """The time for which `handle_request` waits for a connection."""

    def __init__(
        self, host: str, port: int, application: Callable[..., Any], *, has_token: Callable[[str], bool] | None = None
    ) -> None:
        """Listen. `has_token` returns whether a header Authorization has a valid token; None: all requests are alike.

        It is called in the thread of the request.
        """
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self.wsgi_application = application
        self._has_token = has_token
        self._serving: threading.Thread | None = None
        self._ending, self._ended = socket.socketpair()
        self._lock = threading.Lock()
        self._without_head: dict[socket.socket, None] = {}
        """The connections whose request is still to come, the one that has been open longest first."""
        self._answered: dict[socket.socket, tuple[threading.Timer, bool]] = {}
        """The requests that have a slot: the time limit, and whether there is a token."""
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def begin(self, name: str) -> None:
        """Serve in a thread until `end`."""
        self._serving = threading.Thread(target=self._serve, name=name, daemon=True)
        self._serving.start()

    def end(self) -> None:
        """Stop serving; takes no longer than a connection that is being accepted."""
        self._ending.close()
        if self._serving is not None:
            self._serving.join()
        self.server_close()

    def server_close(self) -> None:
        """Close what it listens at."""
        super().server_close()
        self._ending.close()
        self._ended.close()

    def _serve(self) -> None:
        """Accept connections until the other end of `_ended` is closed, without waking up in between."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while all(key.fileobj is not self._ended for key, _ in selector.select()):
                self.handle_request()

    def server_bind(self) -> None:
        """Bind without looking up the name of this host, as the base class does."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 -- as the base class has it
        """Handle a connection in a thread; end the one that has been silent longest if there are too many."""
        with contextlib.suppress(OSError):
            request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        oldest = None
        with self._lock:
            if len(self._without_head) >= MOST_WITHOUT_HEAD:
                oldest = next(iter(self._without_head))
                del self._without_head[oldest]
            self._without_head[request] = None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.send(_TOO_MANY_CONNECTIONS, socket.MSG_DONTWAIT)
            _cut(oldest)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._lift(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 -- as the base class has it
        """Handle a connection within its time limits, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._lift(request)

    def begin_answer(self, request: socket.socket, authorization: str) -> str:
        """Take a slot for a request whose head has come; return why not, in words, if there is none for it."""
        trusted = self._has_token is not None and self._has_token(authorization)
        most, what = MOST_AT_ONCE, "requests"
        if self._has_token is not None:
            most = MOST_AT_ONCE - MOST_WITHOUT_TOKEN if trusted else MOST_WITHOUT_TOKEN
            what = "requests with a token" if trusted else "requests without a token"
        # The handler's timeout starts again with every byte.
        limit = threading.Timer(SECONDS_EACH, _cut, (request,))
        limit.daemon = True
        with self._lock:
            if request not in self._without_head:
                raise ConnectionAbortedError("the connection was ended, since too many were open")
            if sum(each == trusted for _, each in self._answered.values()) >= most:
                return f"cannot answer: {most} {what} are under way, which is the limit; try again later"
            del self._without_head[request]
            self._answered[request] = (limit, trusted)
            limit.start()
        return ""

    def begin_stream(self, request: socket.socket) -> None:
        """Take a request out of the limits; called in its thread."""
        self._lift(request)

    def _lift(self, request: socket.socket) -> None:
        """End the time limit of a request and free its place, unless that was done."""
        with self._lock:
            self._without_head.pop(request, None)
            limit, _ = self._answered.pop(request, (None, False))
        if limit is not None:
            limit.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 -- as the base class has it
        """Ignore errors of clients that disconnected or stayed silent."""


def _receive_head(connection: socket.socket) -> bytes:
    """Return what a client sends up to the empty line behind its headers, or a little more than it may send.

    Raises TimeoutError if it takes too long, and ConnectionAbortedError if the client goes before.
    """
    until, received = time.monotonic() + SECONDS_FOR_HEAD, bytearray()
    while len(received) <= _MOST_HEAD_BYTES:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not come in time")
        connection.settimeout(left)
        piece = connection.recv(_MOST_HEAD_BYTES)
        if not piece:
            raise ConnectionAbortedError("the client has gone")
        received += piece
        if b"\r\n\r\n" in received or b"\n\n" in received:
            break
    return bytes(received)


def _write(write: Callable[[bytes], int], data: bytes) -> int:
    """Write to a client. Raises ConnectionAbortedError if it has not read for `SECONDS_EACH`."""
    try:
        return write(data)
    except TimeoutError as error:
        raise ConnectionAbortedError("the client does not read") from error


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
