"""The server of the metrics: bounded, whatever opens connections to it."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import pytest
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

from mig_agent.daemon import httpserver
from mig_agent.daemon.httpserver import (
    BEGIN_STREAM,
    MOST_AT_ONCE,
    MOST_WITHOUT_HEAD,
    MOST_WITHOUT_TOKEN,
    BoundedServer,
)
from support.agent import GENEROUS_SECONDS, eventually
from support.web import first_line


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[BoundedServer]:
    registry = CollectorRegistry()
    Gauge("example", "An example.", registry=registry).set(7)
    try:
        running = BoundedServer(request.param, 0, make_wsgi_app(registry))
    except OSError:
        pytest.skip(f"there is no {request.param} here")
    running.begin("example")
    yield running
    running.end()


def read(server: BoundedServer) -> str:
    host = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
    address = f"http://{host}:{server.server_port}/metrics"
    with urllib.request.urlopen(address, timeout=GENEROUS_SECONDS) as answer:
        return str(answer.read().decode())


def answering() -> int:
    return sum("process_request_thread" in each.name for each in threading.enumerate())


def test_it_answers(server: BoundedServer) -> None:
    assert "example 7.0" in read(server)


def test_connections_that_say_nothing_are_bounded_and_in_nobodys_way(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpserver, "SECONDS_FOR_HEAD", 4 * GENEROUS_SECONDS)  # it is the number that ends them
    eventually(lambda: not answering(), "the answers of the test before are over")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((server.server_name, server.server_port)))
            for _ in range(2 * MOST_WITHOUT_HEAD)
        ]
        # The ones that have been silent longest are told so and closed.
        for each in silent[:MOST_WITHOUT_HEAD]:
            each.settimeout(GENEROUS_SECONDS)
            words = b""
            while piece := each.recv(4096):
                words += piece
            assert words.startswith(b"HTTP/1.1 503 ")
            assert words.endswith(b"cannot answer: too many connections are open; try again later\n")
        assert "example 7.0" in read(server)
        eventually(lambda: answering() <= MOST_WITHOUT_HEAD, "the threads of those that were closed have ended")
    eventually(lambda: not answering(), "the places are free again")
    assert "example 7.0" in read(server)


def blocking(gate: threading.Event, begun: list[str]) -> Callable[..., list[bytes]]:
    """An application that answers when the gate is open."""

    def application(environ: dict[str, Any], start: Callable[..., object]) -> list[bytes]:
        begun.append(environ.get("HTTP_AUTHORIZATION", ""))
        gate.wait(GENEROUS_SECONDS)
        start("200 OK", [("Content-Length", "0")])
        return []

    return application


def test_requests_without_a_token_have_a_few_slots_and_those_with_one_the_others() -> None:
    gate, begun = threading.Event(), list[str]()
    server = BoundedServer("127.0.0.1", 0, blocking(gate, begun), has_token=lambda given: given == "right")
    server.begin("tokens")
    address = (server.server_name, server.server_port)
    try:
        with ExitStack() as stack:

            def ask(token: str) -> socket.socket:
                opened = stack.enter_context(socket.create_connection(address, timeout=GENEROUS_SECONDS))
                opened.sendall(f"GET / HTTP/1.1\r\nHost: here\r\nAuthorization: {token}\r\n\r\n".encode())
                return opened

            without = [ask(token) for token in ("", "wrong") * MOST_WITHOUT_TOKEN]
            eventually(lambda: len(begun) == MOST_WITHOUT_TOKEN, "their slots are taken")
            with_token = [ask("right") for _ in range(MOST_AT_ONCE - MOST_WITHOUT_TOKEN)]
            eventually(lambda: begun.count("right") == len(with_token), "all others are for those with a token")
            assert first_line(ask("right")).startswith(b"HTTP/1.1 503 ")
            gate.set()
            assert all(first_line(each).endswith(b" 200 OK\r\n") for each in with_token)
            lines = [first_line(each) for each in without]
            assert sum(b" 200 " in each for each in lines) == MOST_WITHOUT_TOKEN
            assert sum(b" 503 " in each for each in lines) == MOST_WITHOUT_TOKEN
    finally:
        gate.set()
        server.end()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n", 400),
        (b"GET / nonsense <b>\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
    ],
)
def test_what_cannot_be_understood_gets_words_of_this_server(sent: bytes, status: int) -> None:
    server = BoundedServer("127.0.0.1", 0, blocking(threading.Event(), []))
    server.begin("words")
    try:
        with socket.create_connection((server.server_name, server.server_port), timeout=GENEROUS_SECONDS) as asking:
            asking.sendall(sent)
            with asking.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"\r\nContent-Type: text/plain; charset=utf-8\r\n" in head
        assert b"\r\nContent-Length: %d\r\n" % len(body) in head + b"\r\n"
        assert body.startswith(b"cannot ")
        assert b"<" not in body
    finally:
        server.end()


def test_an_address_that_is_taken_cannot_be_had(server: BoundedServer) -> None:
    with pytest.raises(OSError, match="in use"):
        BoundedServer(server.server_name, server.server_port, make_wsgi_app())


def test_who_drips_is_cut_off(server: BoundedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpserver, "SECONDS_FOR_HEAD", 0.2)
    with socket.create_connection((server.server_name, server.server_port)) as dripping:
        eventually(lambda: _is_cut(dripping), "the connection is cut")


class _Endless:
    """A stream that has a piece whenever one is wanted, until it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __call__(self, environ: dict[str, Any], start: Callable[..., object]) -> Self:
        environ[BEGIN_STREAM]()
        start("200 OK", [("Content-Type", "text/event-stream")])
        return self

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield b"x" * 65536

    def close(self) -> None:
        self.closed.set()


def test_a_stream_may_last_and_a_client_that_does_not_read_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(httpserver, "SECONDS_EACH", 0.2)
    monkeypatch.setattr(httpserver._Handler, "timeout", 0.2)
    stream = _Endless()
    server = BoundedServer("127.0.0.1", 0, stream)
    server.begin("endless")
    try:
        with socket.create_connection((server.server_name, server.server_port)) as reading:
            reading.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until = time.monotonic() + 0.6  # three times as long as another answer may take
            while time.monotonic() < until:
                assert reading.recv(1 << 20)
            assert not stream.closed.is_set()
            assert stream.closed.wait(GENEROUS_SECONDS), "nobody reads it any more"
        eventually(lambda: not answering(), "its thread has ended")
    finally:
        server.end()
    assert capfd.readouterr().err == ""


def test_streams_take_no_place_of_requests() -> None:
    stream = _Endless()
    server = BoundedServer("127.0.0.1", 0, stream)
    server.begin("endless")
    try:
        with ExitStack() as stack:
            for _ in range(3 * MOST_AT_ONCE):
                opened = stack.enter_context(socket.create_connection((server.server_name, server.server_port)))
                opened.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert opened.recv(15).endswith(b"200 OK")
    finally:
        server.end()
    eventually(lambda: not answering(), "the threads have ended")


def _is_cut(connection: socket.socket) -> bool:
    try:
        connection.send(b"G")
        connection.settimeout(0.01)
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
