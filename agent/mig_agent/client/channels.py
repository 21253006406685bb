"""gRPC channels to the agent: plain over a Unix socket, mutual TLS over TCP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from mig_agent.client.addresses import Address
from mig_agent.core.errors import UsageError

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # Clients in one process do not share each other's back-off after a failed connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Not the pause between two attempts but the time for one: a busy machine may need seconds to answer.
    ("grpc.min_reconnect_backoff_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_retries", 0),
    # An agent that hangs, or a host that disappeared, is noticed while a call waits for it.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files: the authority of the agent's certificate, and the client's own certificate and key."""

    ca: Path
    cert: Path
    key: Path
    server_name: str = ""
    """The name in the agent's certificate, if it is not the address's host."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Tls | None:
        """Read MIG_AGENT_TLS_CA, _CERT, _KEY and _SERVER_NAME; None if no file is set. Raises UsageError."""
        return cls.of(
            ca=environment.get("MIG_AGENT_TLS_CA", ""),
            cert=environment.get("MIG_AGENT_TLS_CERT", ""),
            key=environment.get("MIG_AGENT_TLS_KEY", ""),
            server_name=environment.get("MIG_AGENT_TLS_SERVER_NAME", ""),
        )

    @classmethod
    def in_folder(cls, folder: str | Path, *, server_name: str = "") -> Tls:
        """Return the files of a mounted Secret, with cert-manager's names: `ca.crt`, `tls.crt` and `tls.key`."""
        there = Path(folder)
        return cls(ca=there / "ca.crt", cert=there / "tls.crt", key=there / "tls.key", server_name=server_name)

    @classmethod
    def of(cls, *, ca: str, cert: str, key: str, server_name: str = "") -> Tls | None:
        """Return all three files; None if all texts are empty. Raises UsageError if only some are."""
        given = {"ca": ca, "cert": cert, "key": key}
        missing = [name for name, value in given.items() if not value]
        if len(missing) == len(given):
            return None
        if missing:
            raise UsageError(
                f"cannot use TLS without the file for {' and '.join(missing)}",
                "give all of --tls-ca, --tls-cert and --tls-key",
            )
        return cls(ca=Path(ca), cert=Path(cert), key=Path(key), server_name=server_name)


Versions: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"
"""Modification time, inode and size of each of a connection's files; None for a missing one."""


def versions_of(address: Address, tls: Tls | None) -> Versions:
    """Return the versions of the certificate files, which change with a renewal; empty for a Unix socket."""
    return () if tls is None or address.path is not None else tuple(map(_version, (tls.ca, tls.cert, tls.key)))


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        there = path.stat()
    except OSError:
        return None
    return there.st_mtime_ns, there.st_ino, there.st_size


def open_channel(address: Address, tls: Tls | None) -> grpc.Channel:
    """Return a channel that connects on first use. Raises UsageError if TLS is missing or cannot be read."""
    if address.path is not None:
        return grpc.insecure_channel(address.target, options=_OPTIONS)
    return grpc.secure_channel(address.target, _credentials(address, tls), options=_options(tls))


def open_async_channel(address: Address, tls: Tls | None) -> grpc.aio.Channel:
    """Return an asyncio channel for the running event loop; otherwise as `open_channel`."""
    if address.path is not None:
        return grpc.aio.insecure_channel(address.target, options=_OPTIONS)
    return grpc.aio.secure_channel(address.target, _credentials(address, tls), options=_options(tls))


def _options(tls: Tls | None) -> tuple[tuple[str, int | str], ...]:
    name = (("grpc.ssl_target_name_override", tls.server_name),) if tls and tls.server_name else ()
    return (*_OPTIONS, *name)


def _credentials(address: Address, tls: Tls | None) -> grpc.ChannelCredentials:
    if tls is None:
        raise UsageError(
            f"cannot connect to {address} without TLS: over TCP the agent answers only clients that it can know",
            "give --tls-ca, --tls-cert and --tls-key, or use the Unix socket",
        )
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca), private_key=_read(tls.key), certificate_chain=_read(tls.cert)
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", "TLS needs its three files") from error
