"""The programs in examples/ run as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mig_agent.config import load
from support.agent import Agent
from support.documents import ROOT, blocks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(person: dict[str, str], *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=person, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_train(agent: Agent, person: dict[str, str]) -> None:
    done = run(person, sys.executable, str(EXAMPLES / "train.py"))
    (idle,) = agent.instances()
    assert done.stdout.splitlines()[-1] == f"training on {idle['uuid']}"
    assert idle["state"] == "idle"
    run(person, sys.executable, str(EXAMPLES / "train.py"), "sh", "-c", "exit 3", code=3)
    assert not agent.ask("status")["leases"]


def test_batch(agent: Agent, person: dict[str, str]) -> None:
    done = run(person, str(EXAMPLES / "batch.sh"))
    (idle,) = agent.instances()
    assert f"training on {idle['uuid']}" in done.stdout
    assert not agent.ask("status")["leases"]
    assert not run(person, str(EXAMPLES / "batch.sh"), "900G", code=3).stdout


def test_choose_node(agent: Agent, person: dict[str, str]) -> None:
    command = [sys.executable, str(EXAMPLES / "choose_node.py")]
    done = run(person, *command, "--gpu-memory", "4G", "unix:/no/such/agent.sock", agent.address)
    assert done.stdout.strip() == agent.address
    assert "create" in done.stderr
    refused = run(person, *command, "--gpu-memory", "900G", agent.address, code=1)
    assert "cannot" in refused.stderr


def test_kubernetes() -> None:
    """They ask for resources that an agent serves by default; tests/e2e runs them. The page shows one as it is."""
    settings = load()
    memory = {f"{settings.memory_resource_prefix}{amount}" for amount in settings.memory_resources}
    page = {body for body, _ in blocks(ROOT / "docs/kubernetes.md", "yaml")}
    shown = 0
    for path in sorted((EXAMPLES / "kubernetes").iterdir()):
        text = path.read_text()
        assert text.startswith("# "), "what it shows, in words"
        names = re.findall(r"^ +((?:nvidia\.com|mig-agent\.io)/\S+): \d+$", text, re.MULTILINE)
        assert names
        assert all(name in memory or name.startswith(settings.resource_prefix) for name in names)
        assert yaml.safe_load(text)["metadata"]["name"] == path.stem
        shown += text.partition("\n")[2] in page
    assert shown


@pytest.mark.parametrize("example", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_example_is_tested(example: Path) -> None:
    assert f"test_{example.stem}" in globals()
