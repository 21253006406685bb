"""What the agent says about certificates that it cannot use. That the good ones work is shown in tests/faces."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from mig_agent.adapters.transport.tls import Certificates, TlsFiles
from mig_agent.core.errors import ConfigError
from support.certificates import Authority, Pem
from support.volumes import mount, swap


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files_of(authority: Authority, name: str = "server") -> TlsFiles:
    pem = authority.issue(name)
    return TlsFiles(cert=pem.cert, key=pem.key, client_ca=authority.ca)


def test_good_files_are_taken(authority: Authority) -> None:
    assert Certificates(files_of(authority)).credentials() is not None


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_a_missing_file_is_named(which: str, authority: Authority) -> None:
    files = files_of(authority)
    missing: Path = getattr(files, which)
    missing.unlink()
    with pytest.raises(ConfigError, match=f"cannot read {missing}"):
        Certificates(files)


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_a_file_that_is_no_pem_is_told(which: str, authority: Authority) -> None:
    files = files_of(authority)
    wrong: Path = getattr(files, which)
    wrong.write_text("this is not PEM\n")
    with pytest.raises(ConfigError, match="cannot use the") as caught:
        Certificates(files)
    assert "PEM" in caught.value.hint


def test_a_key_of_another_certificate_is_told(authority: Authority) -> None:
    files = TlsFiles(cert=authority.issue("one").cert, key=authority.issue("two").key, client_ca=authority.ca)
    with pytest.raises(ConfigError, match="do not belong together"):
        Certificates(files)


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
        Certificates(files)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o620, 0o602])
def test_a_key_that_others_may_read_or_write_is_refused(mode: int, authority: Authority) -> None:
    files = files_of(authority)
    files.key.chmod(mode)
    with pytest.raises(ConfigError, match=rf"cannot use {files.key}: others than its owner .* \(mode {mode:04o}\)"):
        Certificates(files)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_key_is_the_agents_or_roots_whose_group_may_read_it(authority: Authority) -> None:
    files = files_of(authority)
    files.key.chmod(0o640)
    os.chown(files.key, 0, 61001)
    Certificates(files)
    for mode in (0o600, 0o640):
        files.key.chmod(mode)
        os.chown(files.key, 61001, 61001)
        with pytest.raises(ConfigError, match="it belongs to uid 61001"):
            Certificates(files)


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused_in_words(which: str, kind: str, authority: Authority) -> None:
    files = files_of(authority)
    wrong: Path = getattr(files, which)
    wrong.unlink()
    if kind == "folder":
        wrong.mkdir()
    else:
        os.mkfifo(wrong, 0o600)
    with pytest.raises(ConfigError, match=f"cannot use {wrong}: it is"):
        Certificates(files)


def files_in(folder: Path, pem: Pem, authorities: str) -> TlsFiles:
    mount(folder, pem, authorities)
    return TlsFiles(cert=folder / "tls.crt", key=folder / "tls.key", client_ca=folder / "ca.crt")


def handed_over(certificates: Certificates) -> bool:
    """Whether gRPC is given something new at the next connection."""
    return certificates._fetch() is not None


def test_files_that_stay_are_not_renewed(authority: Authority, tmp_path: Path) -> None:
    certificates = Certificates(files_in(tmp_path / "tls", authority.issue("one"), authority.ca.read_text()))
    assert certificates.reload() is None
    assert not handed_over(certificates)


def test_a_swapped_folder_is_taken_up_once(authority: Authority, tmp_path: Path) -> None:
    folder, ca = tmp_path / "tls", authority.ca.read_text()
    certificates = Certificates(files_in(folder, authority.issue("one"), ca))
    swap(folder, authority.issue("two"), ca)
    found = certificates.reload()
    assert found is not None
    assert (found.taken, found.revokes) == (True, False)
    assert found.words == "the agent's certificate was renewed"
    assert handed_over(certificates)
    assert not handed_over(certificates)
    assert certificates.reload() is None


def test_a_folder_that_is_swapped_for_an_equal_one_is_no_news(authority: Authority, tmp_path: Path) -> None:
    """The kubelet does so when anything else in the volume changes."""
    folder, ca, pem = tmp_path / "tls", authority.ca.read_text(), authority.issue("one")
    certificates = Certificates(files_in(folder, pem, ca))
    swap(folder, pem, ca)
    assert certificates.reload() is None
    assert not handed_over(certificates)


def test_an_authority_more_revokes_nothing_and_one_less_does(authority: Authority, tmp_path: Path) -> None:
    """How an authority is replaced smoothly: both for a while, then the new one alone."""
    folder, pem = tmp_path / "tls", authority.issue("one")
    old, new = authority.ca.read_text(), Authority(tmp_path, "new").ca.read_text()
    certificates = Certificates(files_in(folder, pem, old))
    told = []
    for authorities in (old + new, new + old, new):
        swap(folder, pem, authorities)
        told.append(certificates.reload())
    assert [each and each.revokes for each in told] == [False, False, True]
    assert told[0] is not None
    assert told[0].words == "the clients' authority was renewed"
    assert told[2] is not None
    assert "connections that were made under the former authority are closed" in told[2].words


@pytest.mark.parametrize("broken", ["mismatch", "no certificate", "no authority", "open key", "gone"])
def test_a_rotation_that_cannot_be_used_leaves_the_former(broken: str, authority: Authority, tmp_path: Path) -> None:
    """It is told once, and what comes after it is taken up."""
    folder, ca, pem = tmp_path / "tls", authority.ca.read_text(), authority.issue("one")
    certificates = Certificates(files_in(folder, pem, ca))
    other = authority.issue("two")
    match broken:
        case "mismatch":
            swap(folder, Pem(other.cert, pem.key), ca)
        case "no certificate":
            other.cert.write_text("half of it")
            swap(folder, other, ca)
        case "no authority":
            swap(folder, other, "")
        case "open key":
            other.key.chmod(0o644)
            swap(folder, other, ca)
        case "gone":
            shutil.rmtree(folder / (folder / "..data").readlink())
    found = certificates.reload()
    assert found is not None
    assert not found.taken
    assert found.words.startswith("cannot ")
    assert found.words.endswith("; the former certificates stay in use")
    assert not handed_over(certificates)
    assert certificates.reload() is None
    if broken == "gone":
        (folder / "..data").unlink()
    swap(folder, authority.issue("three"), ca)
    found = certificates.reload()
    assert found is not None
    assert found.taken
    assert handed_over(certificates)


def test_two_rotations_between_two_connections_give_the_last(authority: Authority, tmp_path: Path) -> None:
    folder, ca = tmp_path / "tls", authority.ca.read_text()
    certificates = Certificates(files_in(folder, authority.issue("one"), ca))
    for name in ("two", "three"):
        swap(folder, authority.issue(name), ca)
        assert certificates.reload() is not None
    assert handed_over(certificates)
    assert not handed_over(certificates)


def test_files_that_are_swapped_while_they_are_read_are_read_again(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the certificate would be the former one and the key the new one: a mistake that nobody made."""
    folder, ca, pem = tmp_path / "tls", authority.ca.read_text(), authority.issue("one")
    files = files_in(folder, pem, ca)
    certificates = Certificates(files)
    swap(folder, authority.issue("two"), ca)
    third = authority.issue("three")
    read = Path.read_bytes
    swapped: list[Path] = []

    def read_bytes(path: Path) -> bytes:
        data = read(path)
        if path == files.cert and not swapped:
            swapped.append(path)
            swap(folder, third, ca)
        return data

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    found = certificates.reload()
    assert swapped
    assert found is not None
    assert found.taken
    assert certificates._contents.cert == third.cert.read_bytes()
