"""`kubectl mig` on a cluster of two nodes, started by kubectl from PATH, with the rights that the page lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.cluster import installed
from support.cluster.cluster import Cluster
from support.cluster.pods import PROFILE
from support.cluster.space import Space
from support.documents import ROOT, blocks

Kubectl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kubectl(two_nodes: Cluster, tmp_path: Path) -> Kubectl:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{two_nodes.node.programs.path}"
    environment = installed.environment(two_nodes, tmp_path) | {"PATH": programs, "COLUMNS": "80"}

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["kubectl", *arguments],
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


@pytest.fixture
def viewer(two_nodes: Cluster, kubectl: Kubectl, tmp_path: Path) -> Path:
    """The kubeconfig of somebody who has the rights that docs/kubernetes.md grants for this, and no others."""
    (role,) = [body for body, _ in blocks(ROOT / "docs/kubernetes.md", "yaml") if "pods/exec" in body]
    path = tmp_path / "role.yaml"
    path.write_text(role.replace("alice@example.com", "alice"))
    assert kubectl("apply", "-f", str(path)).returncode == 0
    account = ("-n", installed.NAMESPACE, "serviceaccount/default")
    binding = ("rolebinding", "mig-status-of-a-test", "--role=mig-status", "-n", installed.NAMESPACE)
    kubectl("create", *binding, f"--serviceaccount={installed.NAMESPACE}:default")
    token = kubectl("create", "token", *account[:2], "default").stdout.strip()
    config: dict[str, Any] = json.loads(two_nodes.layout.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    own = tmp_path / "kubeconfig"
    own.write_text(json.dumps(config))
    return own


def test_the_map_of_both_nodes(wide_space: Space, kubectl: Kubectl, viewer: Path) -> None:
    wide_space.running("small", {f"{PROFILE}1g.5gb": 1})
    wide_space.running("large", {f"{PROFILE}1g.20gb": 1})
    done = kubectl("mig", "status", KUBECONFIG=str(viewer))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 nodes, 4 GPUs, 2 leases\n")
    assert done.stdout.count("A100-SXM4-40GB") == done.stdout.count("H100 80GB HBM3") == 2
    assert "fits now (up to" in done.stdout
    header, *rows = kubectl("mig", "leases", KUBECONFIG=str(viewer)).stdout.splitlines()
    assert header.split()[:3] == ["NODE", "LEASE", "HOLDER"]
    assert [
        (row.split()[0], f"{wide_space.name}/{name}" in row) for row, name in zip(rows, ("small", "large"), strict=True)
    ] == [
        ("n1", True),
        ("n2", True),
    ]
    top = kubectl("mig", "top", "--sort", "gpu", KUBECONFIG=str(viewer)).stdout.splitlines()
    assert top[0].startswith("2 nodes, 2 leases")
    assert [row.split()[0] for row in top[2:] if wide_space.name in row] == ["n1", "n2"]
    found = json.loads(kubectl("mig", "status", "--node", "n2", "-o", "json").stdout)
    (node,) = found["nodes"]
    assert node["status"]["leases"][0]["pod"]["name"] == "large"
    wrong = kubectl("mig", "status", "--node", "n22")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_a_node_that_hangs_is_shown_with_the_reason(wide_space: Space, kubectl: Kubectl) -> None:
    there = wide_space.cluster.node_named("n2")
    pod = installed.agent_pod(wide_space.cluster, "n2")
    status = wide_space.cluster.api.get(f"/api/v1/namespaces/{installed.NAMESPACE}/pods/{pod}")["status"]
    container = status["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    there.run("ctr", "tasks", "kill", "--signal", "SIGSTOP", container)
    try:
        done = kubectl("mig", "status", "--timeout", "3s")
    finally:
        there.run("ctr", "tasks", "kill", "--signal", "SIGCONT", container)
    assert done.returncode == 4
    assert "\nn2: no answer within 3 s\n" in done.stdout
    assert done.stdout.count("A100-SXM4-40GB") == 2, "the other node is shown"


def test_without_rights(wide_space: Space, kubectl: Kubectl, viewer: Path) -> None:
    rights = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{installed.NAMESPACE}/rolebindings/mig-status-of-a-test"
    wide_space.cluster.api.delete(rights)
    done = kubectl("mig", "status", KUBECONFIG=str(viewer))
    assert (done.returncode, done.stdout) == (4, "")
    assert "pods is forbidden" in done.stderr
    assert "Hint: ask an administrator of the cluster for the rights" in done.stderr
