"""Where the agent is, and what is said when it is not there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.client.addresses import DEFAULT_ADDRESS, Address, addresses_by_node, diagnose, parse_address, resolve
from mig_agent.client.channels import Tls, open_channel
from mig_agent.core.errors import UsageError
from support.agent import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:///run/x.sock", "unix:/run/x.sock"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("unix:x.sock", "unix:x.sock"),
        ("/run/x.sock", "unix:/run/x.sock"),
        ("./x.sock", "unix:x.sock"),
        (" node-1:7400 ", "dns:///node-1:7400"),
        ("dns:///node-1:7400", "dns:///node-1:7400"),
        ("10.0.0.1:7400", "dns:///10.0.0.1:7400"),
        ("[::1]:7400", "dns:///[::1]:7400"),
    ],
)
def test_addresses_as_people_write_them(text: str, target: str) -> None:
    assert parse_address(text).target == target


@pytest.mark.parametrize(
    "text", ["", " ", "unix:", "unix://", "unix://run/x.sock", "node-1", "node-1:", ":7400", "node-1:0", "node-1:65536"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match=r"^cannot "):
        parse_address(text)


def test_a_path_that_no_socket_can_have() -> None:
    with pytest.raises(UsageError, match="longer than 107 bytes"):
        parse_address("unix:///" + "x" * 200)


def test_the_order_of_where_to_look() -> None:
    environment = {"MIG_AGENT_ADDRESS": "unix:///from/environment"}
    assert resolve("unix:///given", environment).path == Path("/given")
    assert resolve(None, environment).path == Path("/from/environment")
    assert str(resolve(None, {})) == DEFAULT_ADDRESS
    assert str(resolve(None, {"MIG_AGENT_ADDRESS": ""})) == DEFAULT_ADDRESS


def test_why_a_socket_does_not_answer(folder: Path) -> None:
    def words(path: Path) -> str:
        found = diagnose(Address(path))
        return "" if found is None else found.message

    assert "there is no such socket" in words(folder / "none")
    (folder / "file").touch()
    assert "that is not a socket" in words(folder / "file")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "dead"))
        assert "nobody listens there" in words(folder / "dead")
        listening.listen()
        assert words(folder / "dead") == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every socket")
def test_a_socket_that_may_not_be_opened(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "closed"))
        listening.listen()
        (folder / "closed").chmod(0)
        found = diagnose(Address(folder / "closed"))
    assert found is not None
    assert "permission denied" in found.message
    assert "group" in found.hint


def test_administrators_go_to_the_socket_beside(folder: Path) -> None:
    users = Address(folder / "mig-agent.sock")
    assert users.for_admin == users
    (folder / "admin.sock").touch()
    assert users.for_admin == Address(folder / "admin.sock")
    assert users.for_admin.for_admin == users.for_admin
    tcp = parse_address("node-1:7400")
    assert tcp.for_admin == tcp


def test_tcp_takes_certificates() -> None:
    with pytest.raises(UsageError, match="without TLS"):
        open_channel(parse_address("node-1:7400"), None)


def test_tls_takes_all_of_its_files(folder: Path) -> None:
    assert Tls.of(ca="", cert="", key="") is None
    with pytest.raises(UsageError, match="without the file for cert and key"):
        Tls.of(ca="ca.pem", cert="", key="")
    missing = Tls.of(ca=f"{folder}/ca.pem", cert="c", key="k")
    with pytest.raises(UsageError, match="cannot read"):
        open_channel(parse_address("node-1:7400"), missing)
    given = {"MIG_AGENT_TLS_CA": "a", "MIG_AGENT_TLS_CERT": "b", "MIG_AGENT_TLS_KEY": "c"}
    assert Tls.from_environment(given) == Tls(ca=Path("a"), cert=Path("b"), key=Path("c"))


def test_agents_are_found_by_node_in_endpoint_slices() -> None:
    def piece(*endpoints: dict[str, object], port: int = 7400, name: str = "grpc") -> dict[str, object]:
        return {"ports": [{"name": name, "port": port}], "endpoints": list(endpoints)}

    def at(node: str, address: str, **conditions: bool) -> dict[str, object]:
        return {"nodeName": node, "addresses": [address], "conditions": conditions}

    found = addresses_by_node(
        [
            piece(at("n1", "10.88.0.3", ready=True), at("n2", "10.88.0.4", ready=False), at("n3", "10.88.0.5")),
            piece(at("n4", "fd00::4", ready=True), port=7401),
            piece(at("n5", "10.88.0.6", ready=True), name="metrics"),
            {"ports": None, "endpoints": None},
            piece({"addresses": ["10.88.0.7"]}),
        ]
    )
    assert found == {"n1": "10.88.0.3:7400", "n3": "10.88.0.5:7400", "n4": "[fd00::4]:7401"}
    assert parse_address(found["n4"]).target == "dns:///[fd00::4]:7401"


def test_certificates_in_a_secret_that_is_mounted() -> None:
    tls = Tls.in_folder("/tls", server_name="mig-agent.mig-agent.svc")
    assert (tls.ca, tls.cert, tls.key) == (Path("/tls/ca.crt"), Path("/tls/tls.crt"), Path("/tls/tls.key"))
    assert tls.server_name == "mig-agent.mig-agent.svc"
