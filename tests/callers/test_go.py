"""A caller in Go, with stubs generated from proto/, against a running agent."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.agent import PROCESS_SECONDS, Agent
from support.certificates import Authority
from support.gostubs import ROOT
from support.tls import port_of, serving


def call(caller: Path, *arguments: str, code: int = 0) -> Any:
    """What the program tells; its words where it fails."""
    done = subprocess.run(
        [str(caller), *arguments],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_SECONDS,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def check(told: Any, agent: Agent, holder: str) -> None:
    """That it was told what the agent says that it did."""
    assert (told["profile"], told["steps"]) == ("1g.5gb", ["create"])
    assert told["expected_seconds"] > 0
    assert 0 < told["wasted_mib"] < told["score"]
    assert told["again"] == told["lease"]
    assert told["visible"] == told["device"]
    assert told["holder_in_status"] == holder
    assert 3000 < told["renewed_for_seconds"] < 4000
    # The instance's creation names its lease as well.
    assert told["events"] == ["instance-created", "lease-granted", "lease-renewed", "lease-ended"]
    assert told["too_large"] == {
        "code": "OutOfRange",
        "reason": "too-large",
        "retryable": False,
        "revision": None,
        "changed": None,
    }
    outdated = told["outdated"]
    assert (outdated["code"], outdated["reason"], outdated["retryable"]) == ("Aborted", "revision-changed", True)
    assert outdated["changed"] == ["instance-created", "lease-granted"]
    status = agent.ask("status")
    assert status["revision"] > outdated["revision"]
    assert status["leases"] == []
    (idle,) = agent.instances("idle")
    assert idle["uuid"] == told["device"]


def test_over_the_unix_socket(go_caller: Path, folder: Path) -> None:
    with Agent(folder) as agent:
        told = call(go_caller, "-address", agent.address)
        check(told, agent, told["holder_in_status"])
        assert "(go)" in told["holder_in_status"] or told["holder_in_status"] == "go"


def test_over_tcp_with_certificates(go_caller: Path, folder: Path) -> None:
    authority = Authority(folder, "clients")
    own = authority.issue("batch-platform")
    with serving(folder, authority, "--tls-schedulers", "batch-platform") as agent:
        tls = ["-tls-ca", str(authority.ca), "-tls-cert", str(own.cert), "-tls-key", str(own.key)]
        there = ["-address", f"localhost:{port_of(agent)}"]
        check(call(go_caller, *there, *tls), agent, "go")
        stranger = Authority(folder, "strangers").issue("batch-platform")
        words = call(
            go_caller, *there, *tls[:2], "-tls-cert", str(stranger.cert), "-tls-key", str(stranger.key), code=1
        )
        assert words.startswith("cannot go on: plan: ")


def test_for_a_pod_by_an_address_that_no_certificate_names(go_caller: Path, folder: Path) -> None:
    """As a scheduler of Kubernetes calls: a pod's address, the Service's name, and a pod that is to come."""
    authority = Authority(folder, "clients")
    name = "mig-agent.gpus.svc"
    own = authority.issue("batch-platform")
    tls = ["-tls-ca", str(authority.ca), "-tls-cert", str(own.cert), "-tls-key", str(own.key)]
    with serving(folder, authority, "--tls-schedulers", "batch-platform", also=[name], host="127.0.0.2") as agent:
        there = ["-address", f"127.0.0.2:{port_of(agent)}", *tls]
        words = call(go_caller, *there, code=1)
        assert "certificate is valid for 127.0.0.1, not 127.0.0.2" in words
        told = call(go_caller, *there, "-tls-server-name", name, "-pod", "team-a/train/7f2c")
        assert told["promised_to"] == "team-a/train"
        check(told, agent, "pod team-a/train")


@pytest.mark.parametrize("folder", ["tests/callers/go", "examples/kube-scheduler/plugin"])
def test_programs_are_formatted(folder: str) -> None:
    gofmt = shutil.which("gofmt")
    if gofmt is None:
        pytest.fail("cannot look at programs in Go: there is no `gofmt` on the PATH; it comes with Go", pytrace=False)
    done = subprocess.run(
        [gofmt, "-l", str(ROOT / folder)], capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_plugin_is_made_of_the_kubernetes_that_tests_run() -> None:
    """Else it would be built from nothing, for minutes."""
    folder = ROOT / "examples/kube-scheduler"
    required = re.compile(r"^(?:require )?\s*k8s\.io/kubernetes (v\S+)", re.MULTILINE)
    paths = (folder / "plugin/go.mod", ROOT / "tests/e2e/modules/kubernetes/go.mod")
    ours, theirs = (required.findall(path.read_text()) for path in paths)
    assert ours == theirs
    assert f"registry.k8s.io/kube-scheduler:{ours[0]} " in (folder / "extender/deployment.yaml").read_text()
