"""A scheduler finds the agents by their Service and calls them with certificates, which are renewed while they run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent import eventually
from support.certificates import Authority, Pem
from support.cluster import installed, trusted
from support.cluster.api import Json
from support.cluster.cluster import Cluster
from support.cluster.layout import NODE
from support.cluster.space import PATIENCE_SECONDS, Space
from support.cluster.trusted import SERVER_NAME, Trust, flags

MIGCTL = Path(sys.executable).with_name("migctl")
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mig-agent-tls-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def trust(cluster: Cluster, folder: Path) -> Iterator[Trust]:
    """The agents listen for a scheduler; as they were before, at the end."""
    yield trusted.switch_on(cluster, folder)
    installed.install_again(cluster)


@pytest.fixture(autouse=True)
def first_certificates(cluster: Cluster, trust: Trust) -> Iterator[None]:
    """What a test has published is replaced by what was there before it."""
    yield
    trusted.publish(cluster, trust.server, trust.authority.ca.read_text())
    until(cluster, lambda: call(cluster, "status", *trust.flags(cluster)).returncode == 0, "all is as it was")


def call(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What migctl says, on the cluster's network; it does not wait for anybody."""
    return subprocess.run(
        cluster.node.on_network(str(MIGCTL), *arguments, "-o", "json"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def answer(cluster: Cluster, *arguments: str) -> Any:
    done = call(cluster, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def refused(cluster: Cluster, *arguments: str, code: int) -> str:
    done = call(cluster, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def agents_pod(cluster: Cluster) -> Json:
    name = installed.agent_pod(cluster)
    return cluster.api.get(f"/api/v1/namespaces/{installed.NAMESPACE}/pods/{name}")


def until(cluster: Cluster, done: Any, what: str) -> None:
    """The kubelet looks after a pod when something of it changes, and brings its volumes up to date at once."""

    def looked_after() -> bool:
        name = agents_pod(cluster)["metadata"]["name"]
        annotation = {"metadata": {"annotations": {"tests/look": str(next(_numbers))}}}
        cluster.api.merge(f"/api/v1/namespaces/{installed.NAMESPACE}/pods/{name}", annotation)
        return bool(done())

    eventually(looked_after, what, PATIENCE_SECONDS)


def told_of_node(cluster: Cluster, reason: str) -> list[Json]:
    found = cluster.api.items("/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={NODE}")
    return [each for each in found if each["reason"] == reason]


def test_it_finds_the_agent_of_each_node_and_calls_it(space: Space, trust: Trust) -> None:
    """Its address is a pod's, and no certificate names that: it is verified by the name of the Service."""
    cluster = space.cluster
    assert set(trusted.addresses(cluster)) == {NODE}
    own = trust.flags(cluster)
    assert answer(cluster, "status", *own)["node"] == NODE
    lease = answer(cluster, "request", "--mig-profile", "1g.10gb", "--tenant", "team-a", "--name", "job 7", *own)
    (seen,) = space.status().leases
    assert (seen.id, seen.tenant) == (lease["lease"], "team-a")
    assert "administrators" in refused(cluster, "cordon", "0", *own, code=3)
    answer(cluster, "release", lease["lease"], "--token", lease["token"], *own)
    assert not space.status().leases
    by = {each.kind: each.data.get("by") for each in space.agent.events() if each.lease == lease["lease"]}
    assert by["lease-granted"] == by["lease-ended"] == "scheduler"


def test_without_the_name_the_certificate_is_nobodys(cluster: Cluster, trust: Trust) -> None:
    own = trust.flags(cluster)
    words = refused(cluster, "status", *own[: own.index("--tls-server-name")], code=4)
    assert "its certificate has another name" in words


def test_a_certificate_that_nobody_named_has_no_role(cluster: Cluster, trust: Trust) -> None:
    """Not even the agents' own: the authority may have signed for everybody in the cluster."""
    for name in ("web-shop", SERVER_NAME):
        own = flags(cluster, trust.authority, trust.authority.issue(name, file="stranger"))
        assert f"cannot serve the certificate of {name}: it has no role" in refused(cluster, "status", *own, code=3)


def test_certificates_are_renewed_under_a_running_agent(cluster: Cluster, trust: Trust, folder: Path) -> None:
    """The Secret changes, the kubelet swaps the folder, and the next connection meets the new ones."""
    before = agents_pod(cluster)
    other = Authority(folder, "other")
    renewed = flags(cluster, other, other.issue("scheduler", file="scheduler-other"))
    assert call(cluster, "status", *renewed).returncode == 4
    trusted.publish(cluster, trusted.server_certificate(other, "server-other"), other.ca.read_text())
    until(cluster, lambda: call(cluster, "status", *renewed).returncode == 0, "the new certificate is accepted")
    refused(cluster, "status", *trust.flags(cluster), code=4)
    after = agents_pod(cluster)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    until(cluster, lambda: told_of_node(cluster, "CertificatesRenewed"), "the node tells of it")


def test_a_renewal_that_does_not_fit_together_is_told_and_left(cluster: Cluster, trust: Trust) -> None:
    one, two = (trusted.server_certificate(trust.authority, file) for file in ("one", "two"))
    trusted.publish(cluster, Pem(one.cert, two.key), trust.authority.ca.read_text())
    until(cluster, lambda: told_of_node(cluster, "CertificateReloadFailed"), "the node tells of it")
    (told, *_) = told_of_node(cluster, "CertificateReloadFailed")
    assert told["type"] == "Warning"
    assert "they do not belong together; the former certificates stay in use" in told["message"]
    assert answer(cluster, "status", *trust.flags(cluster))["node"] == NODE


def test_an_authority_is_replaced_without_a_gap(cluster: Cluster, trust: Trust, folder: Path) -> None:
    """Both are in a bundle for a while; the agents' own certificate comes from the Secret all the time."""
    other = Authority(folder, "second")
    theirs = other.issue("scheduler", file="scheduler-second")
    trusted.publish_bundle(cluster, "authorities", trust.authority)
    trusted.install(cluster, clientCaConfigMap="authorities")
    try:
        old = trust.flags(cluster)
        # It goes on trusting the agents' certificate, and shows one of the second authority.
        new = [*old, "--tls-cert", str(theirs.cert), "--tls-key", str(theirs.key)]
        assert call(cluster, "status", *old).returncode == 0
        assert call(cluster, "status", *new).returncode == 4
        trusted.publish_bundle(cluster, "authorities", trust.authority, other)
        until(cluster, lambda: call(cluster, "status", *new).returncode == 0, "the second authority is known")
        assert call(cluster, "status", *old).returncode == 0
        trusted.publish_bundle(cluster, "authorities", other)
        until(cluster, lambda: call(cluster, "status", *old).returncode == 4, "the first one is no more")
        assert call(cluster, "status", *new).returncode == 0
    finally:
        trusted.install(cluster)
