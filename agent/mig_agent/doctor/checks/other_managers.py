"""Checks of other programs that configure MIG or keep GPUs in use.

Any client of the driver blocks a change of MIG mode: DCGM, its exporter, nvidia-persistenced, CUDA programs. NVIDIA's
MIG manager (of the GPU operator, or nvidia-mig-manager.service of mig-parted) destroys instances to get the layout that
its label or file names, and so must not run beside the agent (docs/kubernetes.md, "With NVIDIA's GPU operator").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.probe import SUDO_HINT, RunningProgram
from mig_agent.doctor.subject import Subject

_MIG_MANAGERS: Final = frozenset({"nvidia-mig-manager", "nvidia-mig-parted", "mig-parted"})
_DCGM: Final = frozenset({"nv-hostengine", "dcgm-exporter"})
_PERSISTENCED: Final = "nvidia-persistenced"
_DEVICE_PLUGINS: Final = frozenset({"nvidia-device-plugin", "gpu-kubelet-plugin"})
"""NVIDIA's device plugin and the kubelet plugin of its DRA driver."""
_UNIT: Final = "nvidia-mig-manager.service"
_WANTED_BY: Final = ("/etc/systemd/system/multi-user.target.wants", "/etc/systemd/system/sysinit.target.wants")
_MOST_NAMED: Final = 6


def _named(programs: list[RunningProgram]) -> str:
    more = f" and {len(programs) - _MOST_NAMED} more" if len(programs) > _MOST_NAMED else ""
    return ", ".join(map(str, programs[:_MOST_NAMED])) + more


def mig_manager(subject: Subject) -> Iterator[Finding]:
    """Check that no other program changes MIG instances."""
    name = "managers.mig-manager"
    running = [each for each in subject.probe.processes() if each.name in _MIG_MANAGERS]
    enabled = any(_UNIT in subject.probe.names(folder) for folder in _WANTED_BY)
    if running:
        yield failed(
            name,
            f"NVIDIA's MIG manager runs, which destroys instances of the agent: {_named(running)}",
            f"sudo systemctl disable --now {_UNIT}; under the GPU operator: "
            "kubectl label node NODE nvidia.com/gpu.deploy.mig-manager=false",
        )
    elif enabled:
        yield warning(
            name,
            f"{_UNIT} is enabled: it changes instances at the next boot",
            f"sudo systemctl disable --now {_UNIT}",
        )
    else:
        yield ok(name, "no other MIG manager runs")
    plugins = [each for each in subject.probe.processes() if each.name in _DEVICE_PLUGINS]
    settings = subject.found.settings
    if plugins and settings is not None and settings.kubernetes:
        yield warning(
            "managers.device-plugin",
            f"NVIDIA's own plugin also offers GPUs to the kubelet: {_named(plugins)}",
            "kubectl label node NODE nvidia.com/gpu.deploy.device-plugin=false",
        )


def dcgm(subject: Subject) -> Iterator[Finding]:
    """Check for DCGM and its exporter, which keep GPUs open."""
    running = [each for each in subject.probe.processes() if each.name in _DCGM]
    if not running:
        yield ok("managers.dcgm", "DCGM does not run")
        return
    yield ok(
        "managers.dcgm",
        f"DCGM reads the GPUs, which is fine except while MIG mode is switched: {_named(running)}",
        "before that: sudo systemctl stop nvidia-dcgm dcgm-exporter" if _switches(subject) else "",
    )


def persistence(subject: Subject) -> Iterator[Finding]:
    """Check that the driver stays loaded while no program uses the GPUs."""
    name = "managers.persistenced"
    if subject.simulated:
        return
    if any(each.name == _PERSISTENCED for each in subject.probe.processes()):
        hint = f"it blocks a change of MIG mode: sudo systemctl stop {_PERSISTENCED}" if _switches(subject) else ""
        yield ok(name, f"{_PERSISTENCED} keeps the driver loaded", hint)
    elif subject.survey.value is not None:
        yield warning(
            name,
            f"{_PERSISTENCED} does not run: the driver unloads the state of GPUs that no program uses, and on Hopper "
            "and later MIG mode is lost with it",
            f"sudo systemctl enable --now {_PERSISTENCED}",
        )


def _switches(subject: Subject) -> bool:
    """Return True if a GPU is not in MIG mode yet."""
    gpus = () if subject.survey.value is None else subject.survey.value.gpus
    return any(each.mode is not None and each.mode.capable and not each.mode.current for each in gpus)


def gpu_holders(subject: Subject) -> Iterator[Finding]:
    """Check which programs hold a GPU whose MIG mode cannot change because of them."""
    survey = subject.survey.value
    if survey is None:
        return
    for gpu in survey.gpus:
        if gpu.mode is None or not gpu.mode.capable or (gpu.mode.current and gpu.mode.pending) or gpu.minor is None:
            continue
        pids = {each.pid for each in subject.host.holders(gpu.minor)} | set(gpu.processes or ())
        pids.discard(subject.found.pid or -1)
        programs = _programs(subject, pids)
        if programs:
            yield warning(
                "managers.gpu-holders",
                f"GPU {gpu.index} cannot change its MIG mode while these have it open: {_named(programs)}",
                "end them first",
            )
        elif not subject.probe.person.is_root and not subject.simulated:
            yield unknown("managers.gpu-holders", f"which programs have GPU {gpu.index} open is not known", SUDO_HINT)
        else:
            yield ok("managers.gpu-holders", f"no other program has GPU {gpu.index} open")


def _programs(subject: Subject, pids: set[int]) -> list[RunningProgram]:
    """Return the programs by name only: their arguments may hold secrets."""
    found = []
    for pid in sorted(pids):
        try:
            name = ((subject.host.root / f"proc/{pid}/comm").read_text(errors="replace")).strip()
        except OSError:
            name = "a program"
        found.append(RunningProgram(pid=pid, name=name))
    return found


def foreign_instances(subject: Subject) -> Iterator[Finding]:
    """Check for instances that other programs made."""
    node = subject.node
    if node is None:
        return
    for gpu in node.gpus:
        foreign = [each.profile for each in gpu.instances if each.state == "foreign"]
        if foreign:
            yield warning(
                "managers.foreign-instances",
                f"GPU {gpu.index} has instances that the agent did not make and leaves alone: {', '.join(foreign)}",
                f"if nobody counts on them: sudo migctl adopt --gpu {gpu.index}",
            )
