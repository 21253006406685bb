"""What the agent says about certificates that it cannot use. That the good ones work is shown in tests/faces."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from mig_agent.adapters.tls import TlsFiles, _Renewal, server_credentials
from mig_agent.core.errors import ConfigError
from support.certificates import Authority


def problems(_: str) -> None:
    pytest.fail("there is nothing to complain of")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files_of(authority: Authority, name: str = "server") -> TlsFiles:
    pem = authority.issue(name)
    return TlsFiles(cert=pem.cert, key=pem.key, client_ca=authority.ca)


def test_good_files_are_taken(authority: Authority) -> None:
    assert server_credentials(files_of(authority), problems) is not None


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_a_missing_file_is_named(which: str, authority: Authority) -> None:
    files = files_of(authority)
    missing: Path = getattr(files, which)
    missing.unlink()
    with pytest.raises(ConfigError, match=f"cannot read {missing}"):
        server_credentials(files, problems)


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_a_file_that_is_no_pem_is_told(which: str, authority: Authority) -> None:
    files = files_of(authority)
    wrong: Path = getattr(files, which)
    wrong.write_text("this is not PEM\n")
    with pytest.raises(ConfigError, match="cannot use the") as caught:
        server_credentials(files, problems)
    assert "PEM" in caught.value.hint


def test_a_key_of_another_certificate_is_told(authority: Authority) -> None:
    files = TlsFiles(cert=authority.issue("one").cert, key=authority.issue("two").key, client_ca=authority.ca)
    with pytest.raises(ConfigError, match="do not belong together"):
        server_credentials(files, problems)


def test_a_key_with_a_password_is_told_instead_of_asking_for_it(authority: Authority) -> None:
    files = files_of(authority)
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="password"):
        server_credentials(files, problems)


def test_renewed_files_are_read_once_and_broken_ones_leave_the_former(authority: Authority) -> None:
    said: list[str] = []
    files = files_of(authority)
    renewal = _Renewal(files, said.append)
    assert renewal.fetch() is None
    files_of(authority)  # again, under the same names
    assert renewal.fetch() is not None
    assert renewal.fetch() is None
    files.cert.write_text("broken")
    assert renewal.fetch() is None
    assert len(said) == 1
    assert "cannot use the certificate" in said[0]
