"""Checks of the driver: its kernel module, NVML, and whether it is new enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.quantities import counted
from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.probe import SUDO_HINT
from mig_agent.doctor.subject import DRIVER_SECONDS, Subject, words_of

_LOADED: Final = "/sys/module/nvidia/version"
_VERSION_FILE: Final = "/proc/driver/nvidia/version"
_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)")
_OLDEST: Final = 470
"""docs/admin.md: 470 and 510 work with fewer profiles, 525 has all."""
_FULL: Final = 525
_SEVERAL_DEVICES: Final = 570
"""Before R570 a CUDA process sees one MIG device (MIG User Guide; the project's facts about NVML, "Containers")."""


def kernel_module(subject: Subject) -> Iterator[Finding]:
    """Check that the kernel module is loaded, and which version it has."""
    name = "driver.kernel-module"
    if subject.simulated:
        yield ok(name, "the GPUs are simulated: no driver is needed")
        return
    version = module_version(subject)
    if version:
        yield ok(name, f"the NVIDIA kernel module {version} is loaded")
        return
    if subject.agents_gpus:
        yield _seen_by_the_agent_alone(subject, name, "no kernel module of NVIDIA is seen here")
        return
    if not subject.host.has_nvidia_gpu():
        yield failed(
            name,
            "this machine has no NVIDIA GPU on its PCI bus",
            "to try it without one: mig-agent serve --simulate h100-80gb:2 --state-dir /tmp/mig",
        )
        return
    yield failed(
        name,
        "the NVIDIA kernel module is not loaded",
        "sudo modprobe nvidia, or install the driver: on Debian sudo apt install nvidia-driver, on Ubuntu "
        "sudo ubuntu-drivers install --gpgpu",
    )


def _seen_by_the_agent_alone(subject: Subject, name: str, what: str) -> Finding:
    """Return the finding for a driver that is missing here, while the agent serves GPUs."""
    gpus = counted(subject.agents_gpus, "GPU")
    hint = "" if subject.probe.person.is_root else SUDO_HINT
    return unknown(name, f"{what}, and the agent serves {gpus}: simulated ones, or from where this is not seen", hint)


def module_version(subject: Subject) -> str:
    """Return the version of the loaded kernel module; empty if none is."""
    text = (subject.probe.read(_LOADED) or "").strip()
    if text:
        return text
    match = _KERNEL_MODULE.search(subject.probe.read(_VERSION_FILE) or "")
    return match[1] if match else ""


def nvml(subject: Subject) -> Iterator[Finding]:
    """Check that NVML answers, and within a bounded time."""
    name = "driver.nvml"
    survey, error = subject.survey.value, subject.survey.error
    if survey is not None:
        library = f"NVML {survey.nvml_version}" if survey.nvml_version else "NVML"
        driver = f"{'simulated ' if subject.simulated else ''}driver {survey.driver_version}"
        yield ok(name, f"{library} answers, {driver}")
        return
    match error:
        case ImportError():
            yield unknown(
                name,
                "NVML was not asked: this client is installed without the Python package nvidia-ml-py",
                "pip install nvidia-ml-py, or run the doctor of the agent's own installation",
            )
        case TimeoutError():
            yield failed(
                name,
                f"NVML has not answered within {DRIVER_SECONDS:g} s: the driver hangs",
                "sudo dmesg | grep -i -e nvrm -e xid; if it stays so, reboot",
            )
        case DriverError(kind=DriverErrorKind.OUTDATED):
            yield failed(
                name,
                f"the NVML library is of another version than the loaded kernel module ({module_version(subject)}): "
                "the driver was updated and not reloaded",
                "sudo reboot, or without one: end all GPU programs, sudo migctl pause, "
                "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia, sudo modprobe nvidia, sudo migctl resume",
            )
        case DriverError(kind=DriverErrorKind.LIBRARY) if subject.agents_gpus and not subject.simulated:
            yield _seen_by_the_agent_alone(subject, name, f"NVML cannot be used: {words_of(error)}")
        case DriverError(kind=DriverErrorKind.LIBRARY):
            yield failed(
                name,
                f"NVML cannot be used: {words_of(error)}",
                "install the driver's libraries; on Debian sudo apt install libnvidia-ml1; then nvidia-smi must answer",
            )
        case PermissionError() if subject.simulated:
            yield unknown(name, f"the simulated machine cannot be read: {words_of(error)}", SUDO_HINT)
        case _ if subject.simulated:
            yield failed(
                name,
                f"the simulated machine cannot be used: {words_of(error)}",
                "stop the agent, and give it another --state-dir",
            )
        case _:
            yield failed(name, f"NVML cannot be used: {words_of(error)}", "nvidia-smi tells more")


def version(subject: Subject) -> Iterator[Finding]:
    """Check that the driver is new enough for MIG as the agent uses it."""
    name = "driver.version"
    node = subject.node
    text = subject.survey.value.driver_version if subject.survey.value else module_version(subject)
    text = text or ("" if node is None else node.driver_version)
    major = text.partition(".")[0]
    if not major.isdigit():
        yield unknown(name, "the driver's version is not known")
    elif int(major) < _OLDEST:
        yield failed(name, f"driver {text} is older than {_OLDEST}", f"install {_FULL} or newer")
    elif int(major) < _FULL:
        yield warning(
            name, f"driver {text} works with fewer profiles than {_FULL} and newer", f"install {_FULL} or newer"
        )
    elif int(major) < _SEVERAL_DEVICES:
        yield ok(name, f"driver {text} is new enough; before {_SEVERAL_DEVICES} a CUDA process sees one MIG device")
    else:
        yield ok(name, f"driver {text} is new enough")
    if node is not None and subject.survey.value is not None and node.driver_version not in {"", text}:
        yield warning(
            "driver.agent-version",
            f"the agent uses driver {node.driver_version}, and {text} is installed now",
            "sudo systemctl restart mig-agent",
        )
