"""A small HTTP server for one WSGI application, which limits concurrent requests and the time of each.

prometheus_client's server has neither limit: each idle connection would keep a thread and a file. An application that
answers with a stream takes its request out of these limits, and limits its streams itself.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MOST_AT_ONCE = 16
SECONDS_EACH = 10.0
"""Time limit for receiving a request and sending its answer."""
BEGIN_STREAM = "begin-stream"
"""Key of a WSGI environment. The function there takes the request out of the limits: its answer may last, and only each
write of it has a time limit."""
_STREAM_BUFFER_BYTES = 1 << 17
"""Limit of what the kernel keeps for a client that does not read its stream."""
_LIMIT_MESSAGE = f"cannot answer: {MOST_AT_ONCE} requests are under way, which is the limit; try again later\n".encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_LIMIT_MESSAGE), _LIMIT_MESSAGE)
)


class _Handler(WSGIRequestHandler):
    timeout = SECONDS_EACH
    server: BoundedServer

    def setup(self) -> None:
        """Have writes that take too long end the answer quietly, as for a client that has disconnected."""
        super().setup()
        self.wfile.write = partial(_write, self.wfile.write)  # type: ignore[method-assign] # the server's own file, of this connection alone

    def get_environ(self) -> dict[str, Any]:
        """Add the function that begins a stream."""
        return super().get_environ() | {BEGIN_STREAM: partial(self.server.begin_stream, self.connection)}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 -- as the base class has it
        """Log nothing: reading metrics is no news."""


class BoundedServer(ThreadingMixIn, WSGIServer):
    """Serves requests in daemonic threads. Raises OSError if it cannot listen."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, application: Callable[..., Any]) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._slots = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._timers: dict[socket.socket, threading.Timer] = {}
        """The time limits of the requests that have a slot."""
        super().__init__((str(address[0]), int(address[1])), _Handler)
        self.set_app(application)

    def begin(self, name: str) -> None:
        """Serve in a thread until `end`."""
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    def end(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without looking up the name of this host, as the base class does."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 -- as the base class has it
        """Handle a request in a thread, or answer 503 at the limit."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(_REFUSAL)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 -- as the base class has it
        """Handle a request within its time limit, in its thread."""
        # The handler's timeout starts again with every byte.
        cut = threading.Timer(SECONDS_EACH, _cut, (request,))
        cut.daemon = True
        self._timers[request] = cut
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._lift(request)

    def begin_stream(self, request: socket.socket) -> None:
        """Take a request out of the limits; called in its thread."""
        self._lift(request)
        with contextlib.suppress(OSError):
            request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_BUFFER_BYTES)

    def _lift(self, request: socket.socket) -> None:
        """End the time limit of a request and free its slot, unless that was done."""
        cut = self._timers.pop(request, None)
        if cut is not None:
            cut.cancel()
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 -- as the base class has it
        """Ignore errors of clients that disconnected or stayed silent."""


def _write(write: Callable[[bytes], int], data: bytes) -> int:
    """Write to a client. Raises ConnectionAbortedError if it has not read for `SECONDS_EACH`."""
    try:
        return write(data)
    except TimeoutError as error:
        raise ConnectionAbortedError("the client does not read") from error


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
