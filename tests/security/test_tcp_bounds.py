"""Connections over TCP are counted before anybody looks at their certificates."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.transport import tcp
from mig_agent.core.errors import ConfigError
from support.agent import GENEROUS_SECONDS, Agent, eventually
from support.certificates import Authority
from support.tls import client_context, port_of, serving, shake

MOST = 4
"""Connections over TCP; half of them from one address."""
HERE, THERE, ELSEWHERE = "127.0.0.1", "127.0.0.2", "127.0.0.3"


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "clients")


@pytest.fixture
def agent(folder: Path, authority: Authority) -> Iterator[Agent]:
    with serving(folder, authority, "--max-connections", str(MOST)) as running:
        yield running


@pytest.fixture
def context(authority: Authority) -> ssl.SSLContext:
    return client_context(authority, authority.issue("alice"), ssl.TLSVersion.TLSv1_3)


def connect(agent: Agent, source: str) -> socket.socket:
    """A client that says nothing."""
    return socket.create_connection(("127.0.0.1", port_of(agent)), GENEROUS_SECONDS, (source, 0))


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def is_turned_away(connection: socket.socket) -> bool:
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionError:
            return True


def test_one_address_cannot_take_all_places(agent: Agent, context: ssl.SSLContext) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(agent, HERE)) for _ in range(MOST // 2)]
        assert is_turned_away(connect(agent, HERE))
        assert all(map(is_open, silent))
        assert shake(agent, context, THERE)
        assert f"{MOST // 2} connections from {HERE} are open" in agent.log()
    # A place is free again when its connection has ended.
    assert eventually(lambda: _shakes(agent, context, HERE))


def test_all_addresses_together_have_a_bound_and_the_unix_sockets_are_not_counted(
    agent: Agent, context: ssl.SSLContext
) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(agent, each)) for each in (HERE, HERE, THERE, THERE)]
        assert is_turned_away(connect(agent, ELSEWHERE))
        assert all(map(is_open, silent))
        assert not _shakes(agent, context, ELSEWHERE)
        assert agent.ask("status")["node"] == "tested"


def _shakes(agent: Agent, context: ssl.SSLContext, source: str) -> bool:
    try:
        return shake(agent, context, source) is not None
    except OSError:
        return False


@pytest.mark.parametrize(
    ("family", "address", "host"),
    [
        (socket.AF_INET, "203.0.113.7", "203.0.113.7"),
        (socket.AF_INET6, "::ffff:203.0.113.7", "203.0.113.7"),
        (socket.AF_INET6, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        (socket.AF_INET6, "fe80::1%eth0", "fe80::/64"),
    ],
)
def test_who_has_a_whole_network_is_counted_as_one(family: int, address: str, host: str) -> None:
    assert tcp._host(family, address) == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_host_is_listened_on_at_one_port(host: str) -> None:
    listeners, port = tcp.listen(host, 0)
    try:
        assert port
        assert {each.getsockname()[1] for each in listeners} == {port}
        with pytest.raises(ConfigError, match=rf"cannot listen on {re.escape(host)}:{port}: address already in use"):
            tcp.listen(host, port)
    finally:
        for each in listeners:
            each.close()


def test_a_host_that_nobody_knows_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:7400: "):
        tcp.listen("no.such.host.invalid", 7400)
