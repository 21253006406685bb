"""An agent that listens on TCP, and handshakes made by another implementation than gRPC's."""

from __future__ import annotations

import socket
import ssl
import warnings
from collections.abc import Sequence
from pathlib import Path

import grpc

from support.agent import GENEROUS_SECONDS, Agent
from support.certificates import Authority, Pem

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2 says first, with empty SETTINGS (RFC 9113, 3.4)."""


def serving(
    folder: Path, authority: Authority, *flags: str, host: str = "127.0.0.1", also: Sequence[str] = ()
) -> Agent:
    """An agent, not started yet, that listens on a Unix socket and on TCP; `also` are names in its certificate."""
    server = authority.issue("server", also=also)
    tls = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
    return Agent(folder, flags=[*tls, *flags], listen=[f"unix://{folder}/agent.sock", f"{host}:0"])


def port_of(agent: Agent) -> int:
    """The TCP port that the kernel chose."""
    return int(agent.serving()["listen"][1].rpartition(":")[2])


def channel_to(agent: Agent, authority: Authority, client: Pem) -> grpc.Channel:
    """With this certificate."""
    credentials = grpc.ssl_channel_credentials(
        authority.ca.read_bytes(), client.key.read_bytes(), client.cert.read_bytes()
    )
    return grpc.secure_channel(f"127.0.0.1:{port_of(agent)}", credentials)


def shake(agent: Agent, context: ssl.SSLContext, source: str = "127.0.0.1") -> str | None:
    """The version of TLS that both sides agree on. Raises OSError where they do not."""
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port_of(agent)), GENEROUS_SECONDS, (source, 0)) as plain,
        context.wrap_socket(plain) as connection,
    ):
        # In TLS 1.3 the server judges the client's certificate after the client is done: its verdict comes here.
        connection.sendall(PREFACE)
        if not connection.recv(1):
            raise ConnectionError("closed after the handshake")
        return connection.version()


def client_context(
    authority: Authority, client: Pem | None, version: ssl.TLSVersion, *, trusting: bool = True
) -> ssl.SSLContext:
    """A client that speaks this version alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.ca)
    if not trusting:
        context.verify_mode = ssl.CERT_NONE
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    context.set_ciphers("ALL:@SECLEVEL=0")  # nothing on our side shall stand in the way
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    return context
