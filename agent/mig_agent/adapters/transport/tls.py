"""Certificates for TCP: both sides show one, and renewed files are taken up without a restart."""

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
"""For files that change while they are read. The next look comes soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Three PEM files: the agent's certificate chain, its key, and the authorities of the clients' certificates.

    Each may be a symbolic link into a folder that is swapped as a whole, as in a volume of Kubernetes.
    """

    cert: Path
    key: Path
    client_ca: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Files that were found to have changed, in words for people."""

    words: str
    taken: bool
    """False where they cannot be used, and the former ones stay."""
    revokes: bool = False
    """Whether an authority of clients is not among the new ones: who has shown its certificate may be known no more."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """What was read, checked."""

    cert: bytes
    key: bytes
    client_ca: bytes

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """As gRPC takes it."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.client_ca)

    def authorities(self) -> frozenset[bytes]:
        """Those of clients, each in DER."""
        return frozenset(ssl.PEM_cert_to_DER_cert(each.decode("ascii")) for each in _PEM.findall(self.client_ca))


class Certificates:
    """Those in use. They are replaced by `look`, and nothing else reads files; safe to use from several threads."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError where the files cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._contents, self._seen = _read(files)
        self._fresh: grpc.ServerCertificateConfiguration | None = None
        """What gRPC has not been given yet."""

    def credentials(self) -> grpc.ServerCredentials:
        """For one port: TLS 1.2 or newer (gRPC offers nothing older), with a certificate required of every client.

        Each connection is judged by what the last `look` before it has found.
        """
        # The types of gRPC forget what its documentation says: None stands for "no change".
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._hand_over)
        return grpc.dynamic_ssl_server_credentials(
            self._contents.configuration(), fetch, require_client_authentication=True
        )

    def look(self) -> Renewal | None:
        """Takes up files that have changed since the last time; None where none has. Blocks while it reads them.

        What cannot be used (unreadable, broken, a key of another certificate) is told of once, and looked at again when
        a file changes again.
        """
        with self._looking:
            versions = _versions(self._files)
            if versions == self._seen:
                return None
            try:
                contents, self._seen = _read(self._files)
            except ConfigError as error:
                self._seen = versions
                return Renewal(words=f"{error.message}; the former certificates stay in use", taken=False)
            before, self._contents = self._contents, contents
            if contents == before:
                return None  # written again as they were
            with self._lock:
                self._fresh = contents.configuration()
            revokes = bool(before.authorities() - contents.authorities())
            return Renewal(words=_renewed(before, contents, revokes=revokes), taken=True, revokes=revokes)

    def _hand_over(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, in a thread of its own, at each connection."""
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
    """Tells whether a file was replaced or written to; None stands for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in (files.cert, files.key, files.client_ca):
        try:
            there = path.stat()
            found.append((there.st_mtime_ns, there.st_ino, there.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def _read(files: TlsFiles) -> tuple[_Contents, _Versions]:
    """Contents that belong together: files that were changed while they were read are read again.

    Raises ConfigError where they cannot be used.
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
    """What the three files hold. gRPC itself would only fail handshakes, with no word to anybody."""
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
    """Return the key, of a file that nobody else may read. Raises ConfigError for any other."""
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
