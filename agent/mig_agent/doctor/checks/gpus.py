"""Checks of the GPUs: whether all answer, and the MIG mode of each with what to type.

The rules of the mode are those of the MIG User Guide: on Ampere it needs a reset of the GPU and persists; on Hopper and
later it needs none and is lost when the driver is unloaded and at a reboot. Nothing is switched here.
"""

from __future__ import annotations

from collections.abc import Iterator

from mig_agent.core.model import MigMode
from mig_agent.core.quantities import counted
from mig_agent.core.texts import state_and_reason
from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.probe import SUDO_HINT
from mig_agent.doctor.subject import Subject, words_of

_RESET = "end what runs there, then sudo nvidia-smi --gpu-reset -i {index}; where that is refused: sudo reboot"


def present(subject: Subject) -> Iterator[Finding]:
    """Check that the driver lists every GPU of the PCI bus."""
    name = "gpu.present"
    survey = subject.survey.value
    if survey is None:
        hint = SUDO_HINT if (subject.agents_gpus or subject.is_denied) and not subject.probe.person.is_root else ""
        yield unknown(name, f"the GPUs were not read: {subject.no_survey}", hint)
        return
    on_bus = None if subject.simulated else subject.host.count_nvidia_gpus()
    number = counted(len(survey.gpus), "GPU")
    if on_bus is not None and on_bus > len(survey.gpus):
        yield failed(
            name,
            f"the PCI bus has {counted(on_bus, 'NVIDIA GPU')}, and the driver answers for {len(survey.gpus)}",
            "sudo dmesg | grep -i -e nvrm -e xid; lspci -d 10de:",
        )
    elif not survey.gpus:
        yield failed(name, "the driver lists no GPU", "lspci -d 10de: shows what the PCI bus has")
    else:
        yield ok(name, f"the driver lists {number}")


def mig_mode(subject: Subject) -> Iterator[Finding]:
    """Check the MIG mode of each GPU, current and pending; as the agent knows it if the driver cannot be asked."""
    survey, node = subject.survey.value, subject.node
    managed = set() if node is None else {each.uuid for each in node.gpus}
    if survey is not None:
        for gpu in survey.gpus:
            if gpu.mode is None:
                why = f"GPU {gpu.index} does not answer: {words_of(gpu.error)}"
                yield failed("gpu.mig-mode", why, "sudo dmesg | grep -i -e nvrm -e xid; then reboot")
            else:
                yield _mode(gpu.index, gpu.model, gpu.mode, managed=gpu.uuid in managed)
    elif node is not None:
        for each in node.gpus:
            mode = MigMode(capable=each.mig.capable, current=each.mig.current, pending=each.mig.pending)
            yield _mode(each.index, each.model, mode, managed=True)


def _mode(index: int, model: str, mode: MigMode, *, managed: bool) -> Finding:
    name, gpu = "gpu.mig-mode", f"GPU {index} ({model})"
    if not mode.capable:
        return ok(name, f"{gpu} has no MIG mode")
    if mode.current != mode.pending:
        text = f"{gpu}: MIG mode is {_on(on=mode.current)} and will be {_on(on=mode.pending)} after a reset"
        return warning(name, text, _RESET.format(index=index))
    if not mode.current:
        enable = f"sudo migctl mode enable --gpu {index}" if managed else f"sudo nvidia-smi -i {index} -mig 1"
        return warning(name, f"{gpu}: MIG mode is off, so it has no MIG instances", enable)
    return ok(name, f"{gpu}: MIG mode is on")


def _on(*, on: bool) -> str:
    return "on" if on else "off"


def agents_view(subject: Subject) -> Iterator[Finding]:
    """Check that the agent can use each of the GPUs that it manages."""
    node = subject.node
    if node is None:
        return
    for index, why in node.missing_gpus.items():
        yield failed("gpu.state", f"GPU {index} has not answered since the agent started: {why}", "nvidia-smi")
    for gpu in node.gpus:
        if gpu.state == "lost":
            yield failed("gpu.state", f"GPU {gpu.index} is lost: {gpu.reason}", "sudo dmesg | grep -i -e nvrm -e xid")
        elif gpu.state == "cordoned":
            words = f"GPU {gpu.index} is {state_and_reason(gpu.state, gpu.reason)}"
            yield warning("gpu.state", words, f"sudo migctl uncordon --gpu {gpu.index}")
        blocked = [each for each in gpu.instances if each.state == "blocked"]
        for each in blocked:
            yield warning(
                "gpu.blocked-instance",
                f"GPU {gpu.index}: {each.profile} is blocked: {each.reason or 'the driver does not destroy it'}",
                "end the process that uses it; it is checked again by itself",
            )
    survey = subject.survey.value
    managed = {each.uuid for each in node.gpus}
    others = [] if survey is None else [each.index for each in survey.gpus if each.uuid and each.uuid not in managed]
    others = [index for index in others if index not in node.missing_gpus]
    if others:
        yield ok(
            "gpu.unmanaged", f"the agent does not manage GPU {', '.join(map(str, others))}: see the setting `gpus`"
        )
    elif node.gpus and all(each.state in {"ready", "whole"} for each in node.gpus):
        yield ok("gpu.state", f"the agent uses {counted(len(node.gpus), 'GPU')}")
