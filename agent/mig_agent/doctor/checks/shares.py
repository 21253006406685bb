"""Checks whether each GPU without MIG mode can be shared, and by what its memory limits are enforced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mig_agent.doctor.findings import Finding, ok, unknown, warning
from mig_agent.doctor.subject import Subject

_CGROUP_DRIVER: Final = 615
_MPS_DRIVER: Final = 550
"""The first branches of the driver with memory limits of cgroups, and with MPS daemons whose clients set no limits."""
_MPS_PROGRAM: Final = "nvidia-cuda-mps-control"


def sharing(subject: Subject) -> Iterator[Finding]:
    """Check that each GPU without MIG mode can be shared; why not, and what to type."""
    shared = {} if subject.node is None else {each.uuid: each for each in subject.node.gpus}
    survey = subject.survey.value
    gpus = () if survey is None else [each for each in survey.gpus if each.mode is not None and not each.mode.current]
    for gpu in gpus:
        known = shared.get(gpu.uuid)
        if known is not None and known.shared_memory is not None:
            yield ok("gpu.sharing", f"GPU {gpu.index} can be shared, {known.shared_memory.promise}")
        elif _way(subject, gpu.index, gpu.uuid) == "off":
            yield ok("gpu.sharing", f"GPU {gpu.index} is leased whole only: `fractions` is off")
        else:
            yield _why_not(subject, gpu.index, _way(subject, gpu.index, gpu.uuid), gpu.compute_mode)


def _way(subject: Subject, index: int, uuid: str) -> str:
    """Return the setting `fractions` that holds for a GPU."""
    settings = subject.found.settings
    if settings is None:
        return "auto"
    by_gpu = dict(settings.fractions_by_gpu)
    return str(by_gpu.get(uuid, by_gpu.get(str(index), settings.fractions)))


def _why_not(subject: Subject, index: int, way: str, compute_mode: str) -> Finding:
    """Return the finding for a GPU that the agent does not share, or that no agent serves."""
    reasons, hint = [], ""
    if way in {"auto", "cgroup"}:
        reasons += [f"cgroup: {each}" for each in _against_cgroup(subject)]
    if way in {"auto", "mps"}:
        against = dict(_against_mps(subject, index, compute_mode))
        reasons += [f"mps: {each}" for each in against]
        hint = next(iter(against.values()), "")
    name, ways = "gpu.sharing", 2 if way == "auto" else 1
    if len({each.partition(":")[0] for each in reasons}) == ways:
        return warning(name, f"GPU {index} cannot be shared: {'; '.join(reasons)}", hint)
    if subject.node is None:
        return ok(name, f"nothing is seen that keeps GPU {index} from being shared")
    return unknown(name, f"the agent does not share GPU {index}", "journalctl -u mig-agent tells why")


def _against_cgroup(subject: Subject) -> Iterator[str]:
    version = "" if subject.survey.value is None else subject.survey.value.driver_version
    branch = version.partition(".")[0]
    if branch.isdigit() and int(branch) < _CGROUP_DRIVER:
        yield f"driver {version} has no memory limits, {_CGROUP_DRIVER} has"
    elif not (subject.host.root / "sys/fs/cgroup/cgroup.controllers").exists():
        yield "cgroup v2 is not mounted"


def _against_mps(subject: Subject, index: int, compute_mode: str) -> Iterator[tuple[str, str]]:
    """Yield each reason, and what to type."""
    version = "" if subject.survey.value is None else subject.survey.value.driver_version
    branch = version.partition(".")[0]
    there = subject.probe.program(_MPS_PROGRAM) or (subject.host.root / "usr/bin" / _MPS_PROGRAM).exists()
    if not there:
        install = "it comes with the driver; on Debian sudo apt install nvidia-cuda-mps"
        yield f"{_MPS_PROGRAM} is not installed", install
    if branch.isdigit() and int(branch) < _MPS_DRIVER:
        yield f"driver {version} lets holders lift their limits, {_MPS_DRIVER} does not", "install a newer driver"
    if compute_mode not in {"", "DEFAULT"}:
        yield f"its compute mode is {compute_mode}", f"sudo nvidia-smi -i {index} -c DEFAULT"
