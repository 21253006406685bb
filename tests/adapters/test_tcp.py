"""Where the agent listens on TCP."""

from __future__ import annotations

import socket

import pytest

from mig_agent.adapters.transport import tcp
from mig_agent.config import TcpAddress, parse_address


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[127.0.0.1]:0"])
def test_brackets_do_no_harm_to_an_address_of_ipv4(text: str) -> None:
    """The chart writes them around the pod's address, of whichever kind it is."""
    address = parse_address(text)
    assert isinstance(address, TcpAddress)
    listeners, port = tcp.listen(address.host, address.port)
    try:
        assert [each.family for each in listeners] == [socket.AF_INET]
        assert listeners[0].getsockname() == ("127.0.0.1", port)
    finally:
        for each in listeners:
            each.close()
