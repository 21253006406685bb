"""The programs in examples/ run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mig_agent.config import load
from support.agent import PROCESS_SECONDS, Agent, short_folder
from support.documents import ROOT, blocks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CERTIFICATES = EXAMPLES / "kubernetes/certificates.yaml"
"""Of cert-manager's kinds; the others are of Kubernetes' own."""


def run(person: dict[str, str], *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env=person,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_SECONDS,
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
    for path in sorted({*(EXAMPLES / "kubernetes").iterdir()} - {CERTIFICATES}):
        text = path.read_text()
        assert text.startswith("# "), "what it shows, in words"
        names = re.findall(r"^ +((?:nvidia\.com|mig-agent\.io)/\S+): \d+$", text, re.MULTILINE)
        assert names
        assert all(name in memory or name.startswith(settings.resource_prefix) for name in names)
        assert yaml.safe_load(text)["metadata"]["name"] == path.stem
        shown += text.partition("\n")[2] in page
    assert shown


def test_scheduler() -> None:
    """Its programs run in tests/scheduler, and all of it on a cluster in tests/e2e. Both routes ask for the same."""
    folder = EXAMPLES / "scheduler"
    found = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in sorted(folder.glob("*.yaml"))}
    assert all(path.read_text().startswith("# ") for path in folder.glob("*.yaml")), "what it shows, in words"
    containers = {name: found[name][0]["spec"]["containers"][0] for name in ("pod", "environment")}
    assert containers["pod"]["resources"] == containers["environment"]["resources"]
    (annotation,) = (each["valueFrom"]["fieldRef"]["fieldPath"] for each in containers["environment"]["env"])
    assert annotation == "metadata.annotations['mig-agent.io/visible-devices']"
    (deployment,) = (each for each in found["deployment"] if each["kind"] == "Deployment")
    programs = {path.name for path in folder.glob("*.py")}
    assert Path(deployment["spec"]["template"]["spec"]["containers"][0]["command"][-1]).name in programs


def test_kube_scheduler() -> None:
    """It runs on a cluster in tests/e2e. Both of its ways know the same resources, and all memory classes."""
    folder = EXAMPLES / "kube-scheduler"
    texts = {path: path.read_text() for path in folder.rglob("*.yaml")}
    assert all(text.startswith("# ") for text in texts.values()), "what it shows, in words"
    read = {path.relative_to(folder).as_posix(): list(yaml.safe_load_all(text)) for path, text in texts.items()}
    (extender,), (plugin,) = read["extender/configuration.yaml"], read["plugin/configuration.yaml"]
    (told,) = extender["extenders"]
    managed = {each["name"] for each in told["managedResources"] if each["ignoredByScheduler"]}
    (fit,) = (each["args"] for each in plugin["profiles"][0]["pluginConfig"] if each["name"] == "NodeResourcesFit")
    settings = load()
    memory = {f"{settings.memory_resource_prefix}{amount}" for amount in settings.memory_resources}
    assert managed == memory | {*fit["ignoredResources"]}
    assert {name.partition("/")[0] for name in memory} == {*fit["ignoredResourceGroups"]}
    names = {each["profiles"][0]["schedulerName"] for each in (extender, plugin)}
    assert names == {read["pod.yaml"][0]["spec"]["schedulerName"]}
    for (deployment,) in (read["extender/deployment.yaml"], read["plugin/deployment.yaml"]):
        secrets = [each["secret"]["secretName"] for each in deployment["spec"]["template"]["spec"]["volumes"][1:]]
        assert secrets == ["mig-scheduler-tls"]


def test_certificates() -> None:
    """Cert-manager is not there to ask; that they fit the chart, the example's scheduler and each other can be seen."""
    objects = [each for each in yaml.safe_load_all(CERTIFICATES.read_text()) if each]
    assert {each["apiVersion"] for each in objects} == {"cert-manager.io/v1"}
    assert {each["metadata"]["namespace"] for each in objects} == {"mig-agent"}
    issuers = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Issuer"}
    made = {each["spec"]["secretName"]: each["spec"] for each in objects if each["kind"] == "Certificate"}
    assert all(each["issuerRef"] == {"name": each["issuerRef"]["name"], "kind": "Issuer"} for each in made.values())
    assert {each["issuerRef"]["name"] for each in made.values()} == set(issuers)
    (authority,) = (name for name, each in made.items() if each.get("isCA"))
    assert issuers["mig-agent"]["ca"]["secretName"] == authority

    agents, scheduler = made["mig-agent-tls"], made["mig-scheduler-tls"]
    helpers = (ROOT / "deploy/chart/mig-agent/templates/_helpers.tpl").read_text()
    assert 'printf "%s-tls" (include "mig-agent.fullname" .)' in helpers
    assert (agents["dnsNames"], agents["usages"]) == (["mig-agent.mig-agent.svc"], ["server auth"])
    assert (scheduler["commonName"], scheduler["usages"]) == ("mig-agent-scheduler", ["client auth"])
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert f"'scheduler.names={{{scheduler['commonName']}}}'" in page
    assert "secretName: mig-scheduler-tls" in (EXAMPLES / "scheduler/deployment.yaml").read_text()


def test_elastic() -> None:
    """Their frameworks are large and not here: stand-ins with the calls that they document."""
    code = """
import sys, types, signal
for name, base in (("transformers", "TrainerCallback"), ("lightning.pytorch", "Callback")):
    sys.modules[name] = types.SimpleNamespace(**{base: object})
sys.modules["lightning"] = types.ModuleType("lightning")
import hf_trainer, lightning_callback
from mig_agent import elastic
job = elastic.init(12, 6)
for make in (lambda: hf_trainer.Yield(elastic.init(13, 6)), lambda: lightning_callback.Yield(elastic.init(13, 6), "x")):
    try: make()
    except elastic.UsageError as error: print(error)
first, second = hf_trainer.Yield(job), lightning_callback.Yield(job, "last.ckpt")
control = types.SimpleNamespace(should_save=False, should_training_stop=False)
trainer = types.SimpleNamespace(accumulate_grad_batches=2, is_global_zero=True)
trainer.save_checkpoint = lambda path: path.touch()
second.on_train_batch_end(trainer, None, None, None, 1)
hf_trainer.exit_if_yielded(job)
print(first.on_step_end(None, None, control).should_save, second.last("last.ckpt"))
signal.raise_signal(signal.SIGTERM)
print(first.on_step_end(None, None, control).should_training_stop)
second.on_train_batch_end(trainer, None, None, None, 0)
try: second.on_train_batch_end(trainer, None, None, None, 1)
except SystemExit as ended: print(ended.code, second.last("last.ckpt"))
hf_trainer.exit_if_yielded(job)
"""
    with short_folder() as folder:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}/agent:{EXAMPLES}/elastic"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 75, done.stderr
    refused = "cannot spread 13 samples over 3 equal micro-batches"
    assert done.stdout.splitlines() == [refused, refused, "False None", "True", "75 last.ckpt"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_example_is_tested(example: Path) -> None:
    assert f"test_{example.stem.replace('-', '_')}" in globals()
