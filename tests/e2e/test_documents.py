"""What the pages on Kubernetes and examples/kubernetes show is what happens, by kubectl, as a person would do it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from support.cluster.cluster import Cluster
from support.cluster.space import Space
from support.documents import PAGES, ROOT, blocks, examples_of, needed_first, pattern_of, with_examples

EXAMPLES = ROOT / "examples/kubernetes"
Shell = Callable[[str], subprocess.CompletedProcess[str]]
KLOG = re.compile(r"^[EIW]\d{4} \d\d:\d\d:\d\d\.\d+ .*\n", re.MULTILINE)
"""What kubectl's library says beside the answer, as `kubectl wait` now and then does of the watch that it has ended."""
DEVICE = r"MIG-[0-9a-f-]{36}"


@pytest.fixture
def shell(cluster: Cluster, space: Space, tmp_path: Path) -> Shell:
    """Runs a command line with the programs of a cluster's administrator, in the namespace of the test."""
    config = json.loads(cluster.layout.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = space.name
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{cluster.node.programs.path}",  # kubectl mig
        "KUBECONFIG": str(path),
        "HOME": str(tmp_path),
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def done(shell: Shell, command: str) -> str:
    answer = shell(command)
    assert answer.returncode == 0, f"$ {command}\n{answer.stdout}"
    return answer.stdout


@pytest.mark.parametrize("page", with_examples("cluster"), ids=lambda page: page.name)
def test_commands_do_what_the_page_shows(page: Path, shell: Shell) -> None:
    try:
        for example in (*needed_first(page, "cluster"), *examples_of(page, "cluster")):
            answer = shell(example.command)
            assert answer.returncode == example.code, f"$ {example.command}\n{answer.stdout}"
            said = KLOG.sub("", answer.stdout)
            assert pattern_of(example.output).fullmatch(said), f"$ {example.command}\n{answer.stdout}"
    finally:
        # The page pauses the agent; where it stops half-way nobody resumes it.
        shell("kubectl -n mig-agent exec daemonset/mig-agent -- migctl resume")


@pytest.mark.parametrize("page", [page for page in PAGES if "```yaml" in page.read_text()], ids=lambda page: page.name)
def test_objects_are_what_the_api_server_takes(page: Path, shell: Shell, tmp_path: Path) -> None:
    for number, (body, _) in enumerate(blocks(page, "yaml")):
        if not re.search("^kind:", body, re.MULTILINE):
            continue
        path = tmp_path / f"{number}.yaml"
        path.write_text(body)
        done(shell, f"kubectl apply --dry-run=server --validate=strict -f {path}")


FINISHED = "Succeeded"
LOGS = {
    "profile": {"train": rf"training on {DEVICE}\n"},
    "memory": {"train": rf"training on {DEVICE}\n"},
    "several": {
        "log": r"logging, and no GPU: none\n",
        "train": rf"training on {DEVICE},{DEVICE}\n",
        "serve": rf"serving on {DEVICE}\n",
    },
    "init-container": {"warm-up": rf"warming up on {DEVICE}\n", "train": rf"training on {DEVICE}\n"},
}
"""What the containers of each pod say."""


@pytest.mark.parametrize("name", LOGS)
def test_pods(name: str, shell: Shell) -> None:
    done(shell, f"kubectl apply -f {EXAMPLES}/{name}.yaml")
    done(shell, f"kubectl wait pod/{name} --for=jsonpath='{{.status.phase}}'={FINISHED} --timeout=200s")
    said = {container: done(shell, f"kubectl logs {name} -c {container}") for container in LOGS[name]}
    for container, pattern in LOGS[name].items():
        assert re.fullmatch(pattern, said[container])
    devices = [each for words in said.values() for each in re.findall(DEVICE, words)]
    if name == "init-container":
        assert len(set(devices)) == 1, "the init container hands its device on"
    else:
        assert len(set(devices)) == len(devices), "no two containers have the same one"


def test_a_deployment(shell: Shell, space: Space) -> None:
    done(shell, f"kubectl apply -f {EXAMPLES}/deployment.yaml")
    done(shell, "kubectl rollout status deployment/deployment --timeout=200s")
    logs = "kubectl logs -l app=deployment"
    space.until(lambda _: len(set(re.findall(DEVICE, done(shell, logs)))) == 3, "each of three has its own")
    assert len(space.leases()) == 3
    done(shell, "kubectl rollout restart deployment/deployment")
    done(shell, "kubectl rollout status deployment/deployment --timeout=200s")
    # The former ones end by a signal, which counts as a failure while they go.
    space.until(lambda pods: len(pods) == 3, "the former pods are gone", may_fail=True)
    space.until(lambda _: len(space.leases()) == 3, "so are their leases", may_fail=True)
    done(shell, f"kubectl delete -f {EXAMPLES}/deployment.yaml")


def test_a_job(shell: Shell) -> None:
    """More runs than there are places, one after the other."""
    done(shell, f"kubectl apply -f {EXAMPLES}/job.yaml")
    done(shell, "kubectl wait job/job --for=condition=Complete --timeout=280s")
    logs = done(shell, "kubectl logs -l job-name=job --tail=-1 --prefix")
    assert len(re.findall(rf"training on {DEVICE}", logs)) == 10
    done(shell, f"kubectl delete -f {EXAMPLES}/job.yaml")


def test_every_example_is_run() -> None:
    names = {path.stem for path in EXAMPLES.iterdir()}
    # Cert-manager, which takes the last, is not on this cluster: see tests/docs.
    assert names == {*LOGS, "deployment", "job", "certificates"}
    assert all([*yaml.safe_load_all(path.read_text())] for path in EXAMPLES.iterdir())
