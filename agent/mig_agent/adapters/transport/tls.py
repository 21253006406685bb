"""Certificates for TCP with mutual TLS; renewed files are used without a restart."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from mig_agent.adapters.secret_files import read_secret
from mig_agent.core.errors import ConfigError

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_MOST_TRIES = 5
"""Attempts to read files that change while they are read. The next check comes soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Three PEM files: the agent's certificate chain, its key, and the authorities of the clients' certificates.

    Each may be a symbolic link into a folder that is swapped as a whole, as in a Kubernetes volume.
    """

    cert: Path
    key: Path
    client_ca: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Certificate files that have changed, with a message for people."""

    words: str
    taken: bool
    """False if the new files cannot be used and the former ones stay in use."""
    revokes: bool = False
    """True if an authority of clients is gone, so that its certificates may no longer be valid."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """Contents of the three files, checked."""

    cert: bytes
    key: bytes
    client_ca: bytes

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the contents as gRPC expects them."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.client_ca)

    def authorities(self) -> frozenset[bytes]:
        """Return the clients' authorities, each in DER."""
        return frozenset(ssl.PEM_cert_to_DER_cert(each.decode("ascii")) for each in _PEM.findall(self.client_ca))


class Certificates:
    """The certificates in use. Only `reload` reads the files and replaces them. Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises ConfigError if they cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._contents, self._versions_read = _read(files)
        self._fresh: grpc.ServerCertificateConfiguration | None = None
        """What gRPC has not fetched yet."""

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one port: TLS 1.2 or newer (gRPC offers nothing older), client certificates required.

        Each connection is checked against what the last `reload` before it read.
        """
        # gRPC's type stubs omit what its documentation says: None means "no change".
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._fetch)
        return grpc.dynamic_ssl_server_credentials(
            self._contents.configuration(), fetch, require_client_authentication=True
        )

    def reload(self) -> Renewal | None:
        """Use files that have changed since the last call; return None if none has. Blocks while it reads them.

        Files that cannot be used (unreadable, broken, a key of another certificate) are reported once, and read again
        when a file changes again.
        """
        with self._reading:
            versions = _versions(self._files)
            if versions == self._versions_read:
                return None
            try:
                contents, self._versions_read = _read(self._files)
            except ConfigError as error:
                self._versions_read = versions
                return Renewal(words=f"{error.message}; the former certificates stay in use", taken=False)
            before, self._contents = self._contents, contents
            if contents == before:
                return None  # rewritten with the same contents
            with self._lock:
                self._fresh = contents.configuration()
            revokes = bool(before.authorities() - contents.authorities())
            return Renewal(words=_renewed(before, contents, revokes=revokes), taken=True, revokes=revokes)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return changed certificates to gRPC, which calls this at each connection in a thread of its own."""
        with self._lock:
            fresh, self._fresh = self._fresh, None
        return fresh


def _renewed(before: _Contents, after: _Contents, *, revokes: bool) -> str:
    changed = []
    if (before.cert, before.key) != (after.cert, after.key):
        changed.append("the agent's certificate")
    if before.client_ca != after.client_ca:
        changed.append("the clients' authority")
    words = f"{' and '.join(changed)} {'was' if len(changed) == 1 else 'were'} renewed"
    return f"{words}; connections that were made under the former authority are closed" if revokes else words


_Versions = tuple[tuple[int, int, int] | None, ...]


def _versions(files: TlsFiles) -> _Versions:
    """Return what changes when a file is replaced or written: its mtime, inode and size; None if it is missing."""
    found: list[tuple[int, int, int] | None] = []
    for path in (files.cert, files.key, files.client_ca):
        try:
            there = path.stat()
            found.append((there.st_mtime_ns, there.st_ino, there.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def _read(files: TlsFiles) -> tuple[_Contents, _Versions]:
    """Read contents that belong together: files that change while they are read are read again.

    Raises ConfigError if they cannot be used.
    """
    for _ in range(_MOST_TRIES):
        versions = _versions(files)
        try:
            contents = _checked(files)
        except ConfigError:
            if versions == _versions(files):
                raise
        else:
            if versions == _versions(files):
                return contents, versions
    raise ConfigError(f"cannot use the certificate {files.cert}: it and the files with it change all the time")


def _checked(files: TlsFiles) -> _Contents:
    """Return the contents of the three files, checked: gRPC itself would only fail handshakes without a message."""
    contents = _Contents(cert=_bytes(files.cert), key=_key(files.key), client_ca=_bytes(files.client_ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (ssl.SSLError, ValueError, OSError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        words = "they do not belong together" if "MISMATCH" in why else why.lower().replace("_", " ")
        raise ConfigError(
            f"cannot use the certificate {files.cert} with the key {files.key}: {words}",
            "both are PEM, and the key has no password",
        ) from error
    try:
        context.load_verify_locations(cadata=contents.client_ca.decode("ascii", "replace"))
        contents.authorities()
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"cannot use the clients' authority {files.client_ca}: it holds no certificate", "write it as PEM"
        ) from error
    return contents


def _no_password() -> str:
    raise ValueError("the key has a password")


def _key(path: Path) -> bytes:
    """Return the key from a file that only its owner may read. Raises ConfigError for any other."""
    try:
        # Volumes of Kubernetes, and what certificates are renewed with, are full of links.
        with read_secret(path, follow_links=True, group_of_root=True) as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"cannot use {path}: it is no regular file", "tls_cert and tls_client_ca name PEM files")
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read {path}: {error.strerror}", "tls_cert, tls_key and tls_client_ca name it")
