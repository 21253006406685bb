"""The settings that concern Kubernetes."""

# ruff: noqa: RUF009 -- setting() makes a dataclasses.field, which is no default that instances share

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mig_agent.config import field_types
from mig_agent.config.field_types import setting
from mig_agent.config.problems import Problem
from mig_agent.core.pod_resources import MEMORY, PROFILES

_KUBERNETES = "Kubernetes"


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Settings for serving pods of this node."""

    kubernetes: bool = setting(
        False,
        "Serve GPUs to pods of this node as extended resources. The node is `node`; its kubelet is reached through "
        "`kubelet_dir`.",
        kind=field_types.SWITCH,
        group=_KUBERNETES,
        example="yes",
    )
    advertise: Literal["device-plugin", "dra", "node-status", "none"] | None = setting(
        None,
        "How the node shows what it can give: `device-plugin` serves it to the kubelet, which gives containers their "
        "devices; `dra` publishes every slot that may exist for Dynamic Resource Allocation, from Kubernetes 1.36 on; "
        "`node-status` writes only the numbers, for a scheduler that takes the leases and assigns pods "
        "their devices itself; `none` shows nothing. See reference/kubernetes.md.",
        kind=field_types.choice("device-plugin", "dra", "node-status", "none"),
        group=_KUBERNETES,
        example="none",
        when_unset="`device-plugin` where `kubernetes` is on and `kubelet_dir` is there, else `none`",
    )
    kubelet_dir: Path = setting(
        Path("/var/lib/kubelet"),
        "Folder of the kubelet, with `device-plugins` and `pod-resources` in it.",
        kind=field_types.PATH,
        group=_KUBERNETES,
        example="/var/lib/kubelet",
    )
    kubeconfig: Path | None = setting(
        None,
        "How to reach the API server.",
        kind=field_types.PATH,
        group=_KUBERNETES,
        example="/etc/kubernetes/mig-agent.conf",
        when_unset="the service account of the agent's pod",
    )
    resource_prefix: str = setting(
        PROFILES,
        "What the names of the resources begin with that are profiles: behind it comes `1g.10gb`, or `1g.10gb.me`.",
        kind=field_types.RESOURCE_PREFIX,
        group=_KUBERNETES,
        example=PROFILES,
    )
    memory_resource_prefix: str = setting(
        MEMORY,
        "What the names of the resources begin with that are amounts of memory: behind it comes `10g`.",
        kind=field_types.RESOURCE_PREFIX,
        group=_KUBERNETES,
        example=MEMORY,
    )
    memory_resources: tuple[str, ...] = setting(
        ("5g", "10g", "20g", "40g", "80g"),
        "The amounts of memory that pods may ask for whatever the GPU model, in decimal gigabytes as `10G` in migctl.",
        kind=field_types.MEMORY_CLASSES,
        group=_KUBERNETES,
        example="5g, 10g, 20g, 40g, 80g",
    )
    whole_gpu_resource: str = setting(
        "",
        "Serve the GPUs without MIG mode whole, under this name. No other device plugin may serve it on the node.",
        kind=field_types.RESOURCE,
        group=_KUBERNETES,
        example="nvidia.com/gpu",
        when_unset="GPUs without MIG mode are not served to pods",
    )
    cdi_dir: Path = setting(
        Path("/var/run/cdi"),
        "Folder where the container runtime looks for CDI files; the agent writes those of its pods into it. It has to "
        "be one that a reboot empties.",
        kind=field_types.PATH,
        group=_KUBERNETES,
        example="/var/run/cdi",
    )
    node_label: str = setting(
        "",
        "Serve pods only while the node carries this label; it may be set and taken away at any time.",
        kind=field_types.LABEL,
        group=_KUBERNETES,
        example="mig-agent.io/managed=true",
        when_unset="every node is served",
    )
    feature_labels: Literal["auto", "off"] = setting(
        "auto",
        "Whether the agent labels the node with its GPUs and profiles: `auto` does so where GPU feature discovery "
        "does not.",
        kind=field_types.choice("auto", "off"),
        group=_KUBERNETES,
        example="off",
    )
    start_deadline: float = setting(
        25.0,
        "How long a starting container waits for its devices before the kubelet has to try again; the kubelet itself "
        "waits 30s.",
        kind=field_types.DURATION,
        group=_KUBERNETES,
        example="25s",
        at_least=1.0,
        at_most=30.0,
    )
    pod_arrival: float = setting(
        600.0,
        "A lease that a scheduler reserved for a pod, and keeps without a deadline, ends this long after it was taken "
        "or last renewed if the API server says that the pod is bound to no node yet.",
        kind=field_types.DURATION,
        group=_KUBERNETES,
        example="10m",
        at_least=1.0,
    )

    def _kubernetes_contradictions(self) -> Iterator[Problem]:
        if self.advertise not in {None, "none"} and not self.kubernetes:
            yield Problem(
                message=f"cannot advertise by {self.advertise}: kubernetes is off",
                hint="switch it on, or leave advertise out",
                setting="advertise",
                involved=("kubernetes",),
            )
