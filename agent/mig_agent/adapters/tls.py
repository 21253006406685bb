"""Certificates for TCP: both sides show one, and renewed files are taken up without a restart."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from mig_agent.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Three PEM files: the agent's certificate chain, its key, and the authority of the clients' certificates."""

    cert: Path
    key: Path
    client_ca: Path


def server_credentials(files: TlsFiles, on_problem: Callable[[str], None]) -> grpc.ServerCredentials:
    """TLS 1.2 or newer (gRPC offers nothing older), with a certificate required of every client.

    Files that change are read again at the next connection; `on_problem` hears when they cannot be used, and the
    former ones stay. Raises ConfigError where they cannot be used now.
    """
    renewal = _Renewal(files, on_problem)
    # The types of gRPC forget what its documentation says: None stands for "no change".
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewal.fetch)
    return grpc.dynamic_ssl_server_credentials(_read(files), fetch, require_client_authentication=True)


class _Renewal:
    """Looks for newer files; called by gRPC, in a thread of its own, at each connection."""

    def __init__(self, files: TlsFiles, on_problem: Callable[[str], None]) -> None:
        self._files = files
        self._on_problem = on_problem
        self._seen = _versions(files)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificates; None where nothing has changed."""
        versions = _versions(self._files)
        if versions == self._seen:
            return None
        self._seen = versions
        try:
            return _read(self._files)
        except ConfigError as error:
            self._on_problem(error.message)
            return None


def _versions(files: TlsFiles) -> tuple[tuple[int, int] | None, ...]:
    found: list[tuple[int, int] | None] = []
    for path in (files.cert, files.key, files.client_ca):
        try:
            there = path.stat()
            found.append((there.st_mtime_ns, there.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """The three files, checked. gRPC itself would only fail handshakes, with no word to anybody."""
    cert, key, client_ca = _text(files.cert), _text(files.key), _text(files.client_ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        words = "they do not belong together" if "MISMATCH" in why else why.lower().replace("_", " ")
        raise ConfigError(
            f"cannot use the certificate {files.cert} with the key {files.key}: {words}",
            "both are PEM, and the key has no password",
        ) from error
    try:
        context.load_verify_locations(files.client_ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"cannot use the clients' authority {files.client_ca}: it holds no certificate", "write it as PEM"
        ) from error
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)


def _no_password() -> str:
    raise ValueError("the key has a password")


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "tls_cert, tls_key and tls_client_ca name it"
        ) from error
