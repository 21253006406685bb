"""Certificates for tests of TLS, made on the spot."""

from __future__ import annotations

import datetime as dt
import ipaddress
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class Authority:
    """Signs certificates; its own is `ca`."""

    def __init__(self, folder: Path, name: str = "tests") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}-ca.pem"
        own = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        file: str = "",
        also: Sequence[str] = (),
        organization: str = "",
        common_names: Sequence[str] | None = None,
    ) -> Pem:
        """A certificate for this common name, for localhost, and for the host names and addresses in `also`.

        `common_names` takes the place of the one name: as many, and as odd ones, as an authority might sign.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # empty ones and longer ones than the standard allows
            attributes = [
                x509.NameAttribute(NameOID.COMMON_NAME, each, _validate=False)
                for each in ([name] if common_names is None else common_names)
            ]
        if organization:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        subject = x509.Name(attributes)
        names = [_alternative_name(host) for host in ("localhost", "127.0.0.1", *also)]
        builder = self._builder(subject, key.public_key()).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        pem = Pem(self._folder / f"{file or name}.pem", self._folder / f"{file or name}.key")
        pem.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pem.key.touch(mode=0o600)
        pem.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pem

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
        )
