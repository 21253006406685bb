"""Checks of what containers need: NVIDIA's container toolkit, and CDI specifications that are not stale.

nvidia-cdi-refresh writes /var/run/cdi/nvidia.yaml at boot and when the driver changes, and not when MIG instances
change (NVIDIA Container Toolkit, "Support for Container Device Interface"); so a CDI file may name instances that are
gone.
Debian 12's containerd 1.6 ignores CDI without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mig_agent.doctor.findings import Finding, ok, unknown, warning
from mig_agent.doctor.probe import DeniedError
from mig_agent.doctor.subject import Subject

_ENGINES: Final = ("dockerd", "podman", "containerd", "crio")
_TOOLKIT: Final = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")
_CDI_FOLDERS: Final = ("/etc/cdi", "/var/run/cdi")
_MIG_UUID = re.compile(r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OWN_CDI: Final = "mig-agent"
"""Files of the agent itself begin so; it keeps them up to date."""


def toolkit(subject: Subject) -> Iterator[Finding]:
    """Check that the container engines of the machine can use NVIDIA GPUs."""
    name = "containers.toolkit"
    engines = [each for each in _ENGINES if subject.probe.program(each)]
    tools = [each for each in _TOOLKIT if subject.probe.program(each)]
    if not engines:
        yield ok(name, "no container engine is installed")
    elif tools:
        yield ok(name, f"NVIDIA's container toolkit is installed ({', '.join(tools)}), for {', '.join(engines)}")
        yield from _docker(subject)
    elif subject.simulated:
        yield ok(
            name,
            f"NVIDIA's container toolkit is not installed, which simulated GPUs do not need ({', '.join(engines)})",
        )
    else:
        yield warning(
            name,
            f"NVIDIA's container toolkit is not installed: containers of {', '.join(engines)} get no GPU",
            "install nvidia-container-toolkit from NVIDIA's repository, then sudo nvidia-ctk runtime configure",
        )


def _docker(subject: Subject) -> Iterator[Finding]:
    if subject.probe.program("dockerd") is None:
        return
    configured = subject.probe.read("/etc/docker/daemon.json") or ""
    if "nvidia" in configured or "cdi" in configured:
        yield ok("containers.docker", "Docker knows NVIDIA's runtime")
    else:
        yield warning(
            "containers.docker",
            "Docker does not know NVIDIA's runtime",
            "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
        )


def cdi(subject: Subject) -> Iterator[Finding]:
    """Check that CDI files name only instances that exist."""
    name = "containers.cdi"
    known = _existing(subject)
    files, stale = [], []
    for folder in _CDI_FOLDERS:
        for file in subject.probe.names(folder):
            if not file.endswith((".yaml", ".json")):
                continue
            path = f"{folder}/{file}"
            files.append(path)
            if known is None or file.startswith(_OWN_CDI):
                continue
            try:
                named = set(_MIG_UUID.findall(subject.probe.read(path) or ""))
            except DeniedError as error:
                yield unknown(name, str(error))
                continue
            if named - known:
                stale.append(path)
    if stale:
        yield warning(
            name,
            f"{', '.join(stale)} names MIG instances that do not exist any more",
            f"sudo nvidia-ctk cdi generate --output={stale[0]}; or use --gpus with Docker, which needs no CDI file",
        )
    elif files:
        yield ok(name, f"CDI files: {', '.join(files)}")
    else:
        yield ok(name, "there are no CDI files; `docker run --gpus` needs none")


def _existing(subject: Subject) -> set[str] | None:
    """Return the MIG UUIDs of the machine; None if the agent does not know those of all GPUs."""
    node, survey = subject.node, subject.survey.value
    if node is None or survey is None or node.missing_gpus:
        return None
    if {each.uuid for each in survey.gpus} - {each.uuid for each in node.gpus}:
        return None
    return {each.uuid for gpu in node.gpus for each in gpu.instances}
