"""What a container runtime takes for a CDI file, written from the specification: SPEC.md and its JSON schema.

https://github.com/cncf-tags/container-device-interface, version 0.7.0 and before. A runtime leaves out a file that
breaks one of these rules, and the pod that names its device does not start.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mig_agent.adapters.device_backends import DeviceAccess
from mig_agent.adapters.host import Host
from mig_agent.simulator import Simulator
from support.simulated import machine

KIND = "mig-agent.io/mig"
_VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0")
_VENDOR = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CLASS = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?")
"""From 0.6.0 dots are allowed in it, too."""
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_HOOKS = {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
_FIELDS = {
    "spec": {"cdiVersion", "kind", "annotations", "devices", "containerEdits"},
    "device": {"name", "annotations", "containerEdits"},
    "edits": {"env", "deviceNodes", "mounts", "hooks", "additionalGids", "intelRdt"},
    "node": {"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"},
    "mount": {"hostPath", "containerPath", "options", "type"},
    "hook": {"hookName", "path", "args", "env", "timeout"},
}


def valid(path: Path) -> dict[str, Any]:
    """The file's contents; fails with the rule that it breaks."""
    spec: dict[str, Any] = json.loads(path.read_bytes())
    known("spec", spec)
    assert spec["cdiVersion"] in _VERSIONS
    vendor, _, class_ = spec["kind"].partition("/")
    assert _VENDOR.fullmatch(vendor)
    assert _CLASS.fullmatch(class_)
    names = [device["name"] for device in spec["devices"]]
    assert names
    assert len(set(names)) == len(names)
    for device in spec["devices"]:
        known("device", device)
        assert _DEVICE.fullmatch(device["name"])
        assert any(device["containerEdits"].values()), "a device that changes nothing"
        check_edits(device["containerEdits"])
    check_edits(spec.get("containerEdits", {}))
    return spec


def check_edits(edits: dict[str, Any]) -> None:
    known("edits", edits)
    for variable in edits.get("env", []):
        name, equals, _ = variable.partition("=")
        assert name
        assert equals
    for node in edits.get("deviceNodes", []):
        known("node", node)
        assert node["path"].startswith("/")
        assert node["type"] in {"b", "c", "u", "p"}
        # Without the major number the runtime would look at the host, where a simulated device is none.
        assert isinstance(node["major"], int)
        assert node["major"] > 0
        assert isinstance(node["minor"], int)
        assert isinstance(node["fileMode"], int)
        assert set(node["permissions"]) <= set("rwm")
    for mount in edits.get("mounts", []):
        known("mount", mount)
        assert mount["hostPath"]
        assert mount["containerPath"]
    for hook in edits.get("hooks", []):
        known("hook", hook)
        assert hook["hookName"] in _HOOKS
        assert hook["path"].startswith("/")


def known(what: str, fields: dict[str, Any]) -> None:
    assert set(fields) <= _FIELDS[what]


def mig_device(simulator: Simulator, gpu: int = 0, profile: str = "1g.5gb") -> DeviceAccess:
    """An instance that is made for it."""
    gpu_instance, compute_instance = simulator.create_foreign(gpu, profile)
    return DeviceAccess(
        gpu_minor=gpu,
        gpu_instance_id=gpu_instance,
        compute_instance_id=compute_instance,
        environment={},
    )


def simulated(folder: Path, gpus: str = "a100-40gb:2") -> tuple[Simulator, Host]:
    """A machine and the host that shows it."""
    simulator = machine(folder, gpus)
    return simulator, Host(simulator.host_root, simulated=True)
