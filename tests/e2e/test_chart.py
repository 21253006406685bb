"""The chart, rendered by the real helm: valid for it, and no more rights than it needs, whatever the values."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mig_agent.config import TcpAddress, load
from support.cluster import installed, programs
from support.cluster.space import Space

CHART = Path(__file__).resolve().parents[2] / "deploy/chart/mig-agent"
IMAGE = "registry.example/mig-agent"
VALUES: Mapping[str, list[str]] = {
    "defaults": [],
    "simulated": ["simulate=a100-40gb:1\\,h100-80gb:2:off"],
    "everything on": [
        "networkPolicy.enabled=true",
        "networkPolicy.from[0].namespaceSelector.matchLabels.team=ops",
        "metrics.serviceMonitor.enabled=true",
        "metrics.serviceMonitor.labels.release=prometheus",
        "image.pullSecrets[0].name=registry",
        "resources.wholeGpu=nvidia.com/gpu",
        "hostNetwork=true",
        "podAnnotations.a=b",
        "podLabels.c=d",
        "extraEnv[0].name=MIG_AGENT_LOG_LEVEL",
        "extraEnv[0].value=debug",
        "settings.reuse=same-tenant",
        "settings.creation_cost=3.5",
        "settings.max_waiting=50",
        "settings.strict_fifo=true",
        "settings.gpus={0,1}",
    ],
    "for schedulers": ["scheduler.enabled=true", "scheduler.names={kai,slurm}"],
    "for schedulers, narrowly": [
        "scheduler.enabled=true",
        "scheduler.names={kai}",
        "scheduler.port=7500",
        "scheduler.tlsSecret=gpu-agents",
        "scheduler.clientCaConfigMap=authorities",
        "scheduler.from[0].namespaceSelector.matchLabels.team=platform",
        "networkPolicy.enabled=true",
        "metrics.enabled=false",
    ],
    "everything off": [
        "metrics.enabled=false",
        "admissionPolicy.enabled=false",
        "serviceAccount.create=false",
        "serviceAccount.name=mine",
        "rbac.create=false",
        "uninstall.clean=false",
        "featureLabels=off",
        "nodeLabel=",
        "runtimeClassName=",
        "priorityClassName=",
    ],
    "elsewhere": [
        "paths.kubelet=/data/kubelet",
        "paths.cdi=/etc/cdi",
        "paths.state=/data/mig",
        "paths.run=/run/mig",
        "nodeLabel=pool=mig",
        "fullnameOverride=gpus",
        "resources.memory={10g,20g}",
        f"image.digest=sha256:{'0' * 64}",
    ],
}
Render = Callable[..., list[dict[str, Any]]]
POD_ADDRESS = "10.88.0.2"


@pytest.fixture(scope="session")
def helm() -> str:
    return programs.ensure()["helm"]


@pytest.fixture(scope="session")
def render(helm: str) -> Render:
    made: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def rendered(*sets: str) -> list[dict[str, Any]]:
        if sets not in made:
            done = run(helm, "template", "mig-agent", str(CHART), "--namespace", "gpus", *flags(sets))
            assert done.returncode == 0, done.stderr
            made[sets] = [each for each in yaml.safe_load_all(done.stdout) if each]
        return made[sets]

    return rendered


@pytest.fixture(params=VALUES.values(), ids=list(VALUES))
def objects(render: Render, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(*request.param)


def flags(sets: tuple[str, ...]) -> list[str]:
    return [part for each in (f"image.repository={IMAGE}", *sets) for part in ("--set", each)]


def run(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True, check=False, timeout=120)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def the(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = of_kind(objects, kind)
    return found


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in objects:
        if each["kind"] in {"DaemonSet", "Job", "Deployment"}:
            yield each["spec"]["template"]["spec"]


def containers(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for pod in pods(objects):
        yield from pod.get("initContainers", [])
        yield from pod["containers"]


@pytest.mark.parametrize("sets", VALUES.values(), ids=VALUES)
def test_helm_lint(helm: str, sets: list[str]) -> None:
    done = run(helm, "lint", "--strict", str(CHART), *flags(tuple(sets)))
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_an_image_it_says_what_is_missing(helm: str) -> None:
    done = run(helm, "template", "mig-agent", str(CHART))
    assert done.returncode != 0
    assert "cannot install: say where the image is" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        "nodelabel=x",
        "nodeLabel=abc",
        "image.tag=latest",
        "paths.cdi=cdi",
        "metrics.port=0",
        "resources.memory={10}",
        "resources.memory={0g}",
        "settings.nonsense=1",
        "settings.idle_limit=-5",
        "scheduler.port=0",
        "scheduler.secret=x",
        "scheduler.tlsSecret=Not A Name",
    ],
)
def test_values_that_cannot_be_meant_are_refused(helm: str, wrong: str) -> None:
    done = run(helm, "template", "mig-agent", str(CHART), *flags((wrong,)))
    assert done.returncode != 0
    assert "schema" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "give scheduler.names the names in their certificates"),
        (["scheduler.names={kai}", "settings.listen=unix:///x.sock"], "and so does settings.listen"),
        (["scheduler.names={kai}", "networkPolicy.enabled=true"], "give scheduler.from whom it is open to"),
        (["scheduler.names={kai}", "scheduler.port=7481"], "give scheduler.port or metrics.port another"),
    ],
)
def test_a_port_for_schedulers_that_nobody_could_use_is_refused(helm: str, wrong: list[str], words: str) -> None:
    done = run(helm, "template", "mig-agent", str(CHART), *flags(("scheduler.enabled=true", *wrong)))
    assert done.returncode != 0
    assert "cannot install: " in done.stderr
    assert words in done.stderr


def test_profiles_and_amounts_have_names_of_their_own(helm: str) -> None:
    done = run(helm, "template", "mig-agent", str(CHART), *flags(("resources.memoryPrefix=nvidia.com/mig-",)))
    assert done.returncode != 0
    assert "nobody could tell" in done.stderr


def test_images_are_pinned(objects: list[dict[str, Any]]) -> None:
    for container in containers(objects):
        name, _, tag = container["image"].rpartition(":")
        assert name in {IMAGE, f"{IMAGE}@sha256"}
        assert tag not in {"", "latest"}


def test_rights_name_what_they_are_for(objects: list[dict[str, Any]]) -> None:
    """No wildcards, no secrets, nothing that makes or deletes anything of anybody else's."""
    for role in (*of_kind(objects, "ClusterRole"), *of_kind(objects, "Role")):
        for rule in role["rules"]:
            everything = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "*" not in everything
            assert not set(rule["resources"]) & {"secrets", "configmaps", "pods/exec", "serviceaccounts/token"}
            if set(rule["verbs"]) & {"delete", "deletecollection", "update"}:
                assert rule["resourceNames"]
            if "create" in rule["verbs"]:
                assert rule["resources"] == ["events"]


def test_the_least_rights(render: Render) -> None:
    role = the(render(), "ClusterRole")
    rights = {resource: rule["verbs"] for rule in role["rules"] for resource in rule["resources"]}
    assert rights == {
        "nodes": ["get", "list", "watch", "patch"],
        "nodes/status": ["patch"],
        "pods": ["get"],
        "events": ["create", "patch"],
    }
    role = the(render("featureLabels=off"), "ClusterRole")
    assert "patch" in role["rules"][0]["verbs"], (
        "labels that it wrote before are taken back, and the policy allows no more"
    )
    role = the(render("featureLabels=off", "admissionPolicy.enabled=false"), "ClusterRole")
    assert role["rules"][0]["verbs"] == ["get", "list", "watch"]


def test_rights_of_the_hook_are_gone_with_it(render: Render) -> None:
    """They are hooks themselves, and the agents do not have them."""
    objects = render()
    deleting = [
        role
        for role in (*of_kind(objects, "Role"), *of_kind(objects, "ClusterRole"))
        if any("delete" in rule["verbs"] for rule in role["rules"])
    ]
    (role,) = deleting
    hooks = [each for each in objects if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert role in hooks
    assert {each["kind"] for each in hooks} == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    weights = {each["kind"]: int(each["metadata"]["annotations"]["helm.sh/hook-weight"]) for each in hooks}
    assert max(weights, key=lambda kind: weights[kind]) == "Job"
    account = the(objects, "Job")["spec"]["template"]["spec"]["serviceAccountName"]
    assert account != the(objects, "DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"]


def test_containers_have_no_more_than_they_need(objects: list[dict[str, Any]]) -> None:
    for container in containers(objects):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        if context.get("privileged"):
            assert container["name"] == "agent"
        else:
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]
    for pod in pods(objects):
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False


def test_simulated_gpus_need_nothing_of_the_host(render: Render) -> None:
    real, simulated = (the(render(*VALUES[name]), "DaemonSet") for name in ("defaults", "simulated"))
    real_pod, pod = real["spec"]["template"]["spec"], simulated["spec"]["template"]["spec"]
    assert real_pod["hostPID"] is True
    assert real_pod["runtimeClassName"] == "nvidia"
    assert real_pod["containers"][0]["securityContext"]["privileged"] is True
    assert "hostPID" not in pod
    assert "runtimeClassName" not in pod
    assert "privileged" not in pod["containers"][0]["securityContext"]
    of_the_host = [
        {each["hostPath"]["path"] for each in volumes if "hostPath" in each}
        for volumes in (real_pod["volumes"], pod["volumes"])
    ]
    assert of_the_host[0] - of_the_host[1] == {"/dev"}


def test_what_is_not_ready_is_not_found_and_lives(objects: list[dict[str, Any]]) -> None:
    """A pod that is bound to a node whose kubelet does not know the agent's resources yet would fail for good."""
    for service in of_kind(objects, "Service"):
        assert not service["spec"].get("publishNotReadyAddresses")
    (container,) = the(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    asks = {name: container[f"{name}Probe"]["exec"]["command"] for name in ("startup", "readiness", "liveness")}
    assert [name for name, command in asks.items() if "--live" not in command] == ["readiness"]
    assert all(command[:2] == ["mig-agent", "health"] for command in asks.values())
    waits = float(asks["readiness"][asks["readiness"].index("--wait") + 1])
    assert waits < container["readinessProbe"]["timeoutSeconds"], "its own words, not the kubelet's"


def test_the_host_is_mounted_where_it_is(objects: list[dict[str, Any]]) -> None:
    """The agent tells the kubelet and the container runtime of files: they must be called the same there."""
    pod = the(objects, "DaemonSet")["spec"]["template"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    host = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    assert host
    assert all(mounts[name] == path for name, path in host.items())
    if "dev" in host:
        # Else the kubelet would leave a file of its own there.
        assert not pod["containers"][0]["terminationMessagePath"].startswith("/dev")
    assert not set(host.values()) & {"/", "/var", "/etc", "/run", "/var/lib", "/var/lib/kubelet"}


def test_the_agent_takes_its_settings(
    objects: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the chart makes is one that the agent reads, and says what the mounts say."""
    pod = the(objects, "DaemonSet")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    monkeypatch.setenv("MIG_AGENT_NODE", "n1")
    for variable in container["env"]:
        if "value" in variable:
            # As the kubelet expands it.
            monkeypatch.setenv(variable["name"], variable["value"].replace("$(POD_IP)", POD_ADDRESS))
    path = tmp_path / "mig-agent.yaml"
    path.write_text(the(objects, "ConfigMap")["data"]["mig-agent.yaml"])
    settings = load(path)
    assert settings.kubernetes
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts["cdi"] == str(settings.cdi_dir)
    assert mounts["state"] == str(settings.state_dir)
    assert mounts["device-plugins"] == f"{settings.kubelet_dir}/device-plugins"
    assert mounts["pod-resources"] == f"{settings.kubelet_dir}/pod-resources"
    assert settings.lock_dir.is_relative_to(mounts["run"])
    assert (
        str(settings.listen[0]) == {each["name"]: each.get("value") for each in container["env"]}["MIG_AGENT_ADDRESS"]
    )
    remote = [each for each in settings.listen if isinstance(each, TcpAddress)]
    assert [each.host for each in remote] == [f"[{POD_ADDRESS}]"] * len(remote)
    ports = [each["containerPort"] for each in container.get("ports", [])]
    assert ports == [each.port for each in (settings.metrics, *remote) if each]
    for file in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if remote else ():
        assert file is not None
        (volume,) = (each["projected"] for each in pod["volumes"] if each["name"] == "tls")
        items = [
            item for source in volume["sources"] for item in (source.get("secret") or source["configMap"])["items"]
        ]
        assert str(file.parent) == mounts["tls"]
        assert file.name in {item["path"] for item in items}


def test_what_is_set_arrives(render: Render, tmp_path: Path) -> None:
    path = tmp_path / "mig-agent.yaml"
    path.write_text(the(render(*VALUES["everything on"]), "ConfigMap")["data"]["mig-agent.yaml"])
    settings = load(path)
    assert (settings.reuse, settings.creation_cost, settings.max_waiting) == ("same-tenant", 3.5, 50)
    assert (settings.strict_fifo, settings.gpus) == (True, ("0", "1"))
    assert settings.whole_gpu_resource == "nvidia.com/gpu"
    path.write_text(the(render(*VALUES["elsewhere"]), "ConfigMap")["data"]["mig-agent.yaml"])
    settings = load(path)
    assert settings.node_label == "pool=mig"
    assert settings.memory_resources == ("10g", "20g")
    path.write_text(the(render(*VALUES["simulated"]), "ConfigMap")["data"]["mig-agent.yaml"])
    assert load(path).simulate == "a100-40gb:1,h100-80gb:2:off"


def test_schedulers_and_nobody_else_may_call(render: Render, tmp_path: Path) -> None:
    """The authority may have signed for everybody in the cluster."""
    path = tmp_path / "mig-agent.yaml"
    path.write_text(the(render(*VALUES["for schedulers"]), "ConfigMap")["data"]["mig-agent.yaml"])
    settings = load(path)
    assert (settings.tls_schedulers, settings.tls_users, settings.tls_admins) == (("kai", "slurm"), (), ())
    objects = render(*VALUES["for schedulers"])
    (service,) = (each for each in of_kind(objects, "Service") if not each["metadata"]["name"].endswith("-metrics"))
    assert service["spec"]["clusterIP"] == "None"
    assert [each["name"] for each in service["spec"]["ports"]] == ["grpc"]


def test_the_port_for_schedulers_is_open_to_whom_it_should_be(render: Render) -> None:
    policy = the(render(*VALUES["for schedulers, narrowly"]), "NetworkPolicy")
    (way_in,) = policy["spec"]["ingress"]
    assert way_in == {
        "ports": [{"port": 7500, "protocol": "TCP"}],
        "from": [{"namespaceSelector": {"matchLabels": {"team": "platform"}}}],
    }


def test_an_agent_without_schedulers_listens_on_no_port(render: Render) -> None:
    container = the(render("metrics.enabled=false"), "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert "ports" not in container
    assert not {"MIG_AGENT_LISTEN", "POD_IP"} & {each["name"] for each in container["env"]}


def test_other_settings_are_other_pods(render: Render) -> None:
    """Settings are read at the start; what has nothing to do with the agent restarts no agent."""

    def template(*sets: str) -> dict[str, Any]:
        return dict(the(render(*sets), "DaemonSet")["spec"]["template"])

    assert template() == template()
    assert template() != template("settings.reuse=never")
    assert template() == template("metrics.serviceMonitor.enabled=true", "networkPolicy.enabled=true")


def test_labels_select_the_agents_alone(objects: list[dict[str, Any]]) -> None:
    daemon_set = the(objects, "DaemonSet")
    selector = daemon_set["spec"]["selector"]["matchLabels"]
    assert selector.items() <= daemon_set["spec"]["template"]["metadata"]["labels"].items()
    for each in (*of_kind(objects, "Service"), *of_kind(objects, "NetworkPolicy"), *of_kind(objects, "ServiceMonitor")):
        spec = each["spec"]
        chosen = spec.get("podSelector", spec.get("selector"))
        assert chosen.get("matchLabels", chosen) == selector
    for job in of_kind(objects, "Job"):
        assert not selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_where_it_runs(render: Render) -> None:
    def keys(*sets: str) -> set[str]:
        affinity = the(render(*sets), "DaemonSet")["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        return {each["key"] for term in terms for each in term["matchExpressions"]}

    assert {"nvidia.com/gpu.present", "mig-agent.io/managed"} < keys()
    assert "pool" in keys("nodeLabel=pool=mig")
    assert "mig-agent.io/managed" not in keys("nodeLabel=")


@pytest.mark.parametrize("sets", VALUES.values(), ids=VALUES)
def test_the_api_server_takes_it(helm: str, space: Space, sets: list[str], tmp_path: Path) -> None:
    """Every field, strictly; but for the one kind that is not Kubernetes' own."""
    done = run(helm, "template", "other", str(CHART), "--namespace", space.name, *flags(tuple(sets)))
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] != "ServiceMonitor"]
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    cluster = space.cluster
    taken = subprocess.run(
        [cluster.node.programs["kubectl"], "apply", "--dry-run=server", "--validate=strict", "--filename", str(path)],
        env=installed.environment(cluster, tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert taken.returncode == 0, taken.stderr
    assert "Warning" not in taken.stderr
    assert len(taken.stdout.splitlines()) == len(objects)


def test_objects_of_the_whole_cluster_carry_the_namespace(render: Render) -> None:
    """Two releases in two namespaces do not take each other's."""
    whole = {"ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    for each in render():
        assert ("namespace" in each["metadata"]) == (each["kind"] not in whole)
        if each["kind"] in whole:
            assert "gpus" in each["metadata"]["name"]
