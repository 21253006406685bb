"""Checks of device nodes: the driver's own, and those of the capabilities of MIG instances.

CUDA needs /dev/nvidiactl, /dev/nvidia-uvm and /dev/nvidiaN, and for a MIG device the two nodes of its capabilities in
/dev/nvidia-caps, which the driver does not create: the agent does, with nvidia-modprobe or mknod (MIG User Guide,
"Device Nodes and Capabilities").
"""

from __future__ import annotations

from collections.abc import Iterator

from mig_agent.core.errors import DriverError
from mig_agent.core.quantities import counted
from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.probe import SUDO_HINT
from mig_agent.doctor.subject import Subject

_MODPROBE = "nvidia-modprobe"


def driver_nodes(subject: Subject) -> Iterator[Finding]:
    """Check the driver's own device nodes."""
    survey = subject.survey.value
    if survey is None:
        hint = SUDO_HINT if subject.is_denied else ""
        yield unknown("devices.nodes", f"the device nodes were not checked: {subject.no_survey}", hint)
        return
    gpus = [f"/dev/nvidia{each.minor}" for each in survey.gpus if each.minor is not None]
    wanted = {
        "/dev/nvidiactl": f"sudo {_MODPROBE}",
        "/dev/nvidia-uvm": f"sudo {_MODPROBE} -u -c=0",
        **{path: f"sudo {_MODPROBE} -c={path.removeprefix('/dev/nvidia')}" for path in gpus},
    }
    missing = {path: hint for path, hint in wanted.items() if not (subject.host.root / path[1:]).exists()}
    for path, hint in missing.items():
        yield failed("devices.nodes", f"{path} is missing: no CUDA program can start", hint)
    if not missing:
        yield ok("devices.nodes", f"{', '.join([*list(wanted)[:2], *gpus[:1]])}{' ...' if gpus[1:] else ''} are there")


def capabilities(subject: Subject) -> Iterator[Finding]:
    """Check that capabilities of MIG instances can be opened, and those of each instance."""
    name = "devices.capabilities"
    survey = subject.survey.value
    if survey is None or not any(each.mode is not None and each.mode.current for each in survey.gpus):
        return
    if not (subject.host.root / "proc/driver/nvidia-caps/mig-minors").exists():
        yield failed(
            name,
            "the kernel module lists no capabilities: /proc/driver/nvidia-caps/mig-minors is missing",
            "sudo modprobe nvidia; a driver of 450 or newer has it",
        )
        return
    try:
        subject.host.major("nvidia-caps")
    except (DriverError, OSError):
        yield failed(name, "/proc/devices lists no nvidia-caps", "sudo modprobe nvidia")
        return
    minors = {each.uuid: each.minor for each in survey.gpus}
    gpus = () if subject.node is None else subject.node.gpus
    checked = 0
    for gpu in gpus:
        minor = minors.get(gpu.uuid)
        for each in gpu.instances:
            if minor is None or each.state != "leased" or each.gpu_instance_id is None:
                continue
            checked += 1
            yield from _of_instance(subject, minor, each.gpu_instance_id, each.compute_instance_id or 0, gpu.index)
    yield ok(name, f"capabilities of MIG instances are listed; {counted(checked, 'leased instance')} checked")
    if not subject.simulated and subject.probe.program(_MODPROBE) is None:
        yield ok("devices.modprobe", f"{_MODPROBE} is not installed: the agent makes device nodes itself, with mknod")


def _of_instance(
    subject: Subject, minor: int, gpu_instance: int, compute_instance: int, index: int
) -> Iterator[Finding]:
    try:
        nodes = subject.host.caps_nodes(minor, gpu_instance, compute_instance)
    except DriverError as error:
        yield warning(
            "devices.capabilities", f"GPU {index}, GPU instance {gpu_instance}: {error.detail}", "nvidia-smi -L"
        )
        return
    for node in nodes:
        if not (subject.host.root / node.path[1:]).exists():
            yield failed(
                "devices.capabilities",
                f"{node.path} of a leased instance on GPU {index} is missing: its programs cannot open it",
                f"sudo mknod -m 444 {node.path} c {node.major} {node.minor}",
            )
