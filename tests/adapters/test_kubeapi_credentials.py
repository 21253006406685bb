"""Credentials of the agent as a pod: the service account's files, which the kubelet renews."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.kubeapi import KubeApiError, KubeClient, credentials
from mig_agent.core.errors import ConfigError
from support.certificates import Authority
from support.webserver import WebServer, json_of, web_server

NODE = {"metadata": {"name": "n1", "uid": "u-1", "resourceVersion": "7"}, "status": {}}
PROGRAM = """
import asyncio, sys
from pathlib import Path
import mig_agent.daemon.kubernetes, mig_agent.daemon.serve
from mig_agent.adapters.kubeapi import KubeClient, credentials

credentials.SERVICE_ACCOUNT = Path(sys.argv[1])

async def ask():
    api = KubeClient.connect(None, "n1")
    print((await api.node()).name)
    api.close()

asyncio.run(ask())
sys.exit("kubernetes" in sys.modules)
"""


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a service account."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("first\n")
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", folder)
    return folder


@pytest.fixture
def server(tmp_path: Path, account: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """An API server that the account's authority has signed for, and that the environment names."""
    authority = Authority(tmp_path)
    own = authority.issue("kube-apiserver")
    (account / "ca.crt").write_bytes(authority.ca.read_bytes())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own.cert, own.key)
    with web_server(lambda _asked: json_of(NODE), tls) as web:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", web.address.rpartition(":")[2])
        yield web


async def test_a_token_that_rotates_is_read_again(server: WebServer, account: Path) -> None:
    api = KubeClient.connect(None, "n1")
    try:
        assert api.address == server.address
        await api.node()
        (account / "token").write_text("second")
        await api.node()
    finally:
        api.close()
    assert [asked.headers["authorization"] for asked in server.asked] == ["Bearer first", "Bearer second"]


async def test_a_token_that_is_gone_is_told(server: WebServer, account: Path) -> None:
    api = KubeClient.connect(None, "n1")
    (account / "token").unlink()
    try:
        with pytest.raises(KubeApiError, match=r"cannot read /api/v1/nodes/n1 at .*token"):
            await api.node()
    finally:
        api.close()
    assert not server.asked


async def test_another_authority_is_not_trusted(server: WebServer, account: Path, tmp_path: Path) -> None:
    (account / "ca.crt").write_bytes(Authority(tmp_path, "another").ca.read_bytes())
    api = KubeClient.connect(None, "n1")
    try:
        with pytest.raises(KubeApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await api.node()
    finally:
        api.close()
    assert not server.asked


@pytest.mark.usefixtures("server")
def test_in_a_pod_the_library_is_not_imported(account: Path) -> None:
    """The import costs every agent of a cluster memory and time."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(account)], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "n1\n"), done.stderr


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", ["token", "ca.crt"])
@pytest.mark.parametrize("text", [None, " \n"])
def test_an_account_that_is_not_whole_is_told(account: Path, name: str, text: str | None) -> None:
    (account / name).unlink()
    if text is not None:
        (account / name).write_text(text)
    with pytest.raises(ConfigError, match=f"cannot reach the API server as a pod of it: .*{name}"):
        KubeClient.connect(None, "n1")


def test_an_address_of_ipv6_has_brackets(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (account / "ca.crt").write_text("of no use yet")
    assert credentials.service_account().address == "https://[fd00::1]:443"
