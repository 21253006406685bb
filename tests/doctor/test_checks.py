"""Each check over a made machine: what it finds, and the command that it names."""

from __future__ import annotations

import grp
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.adapters.nvml.survey import SurveyedGpu
from mig_agent.client.addresses import Address
from mig_agent.client.errors import NoAgent
from mig_agent.client.types import Gpu, Instance, LedgerDoubt, MigMode, Placement
from mig_agent.config import Settings
from mig_agent.core.errors import ConfigError, DriverError, DriverErrorKind
from mig_agent.doctor.agent_settings import FoundSettings
from mig_agent.doctor.checks import (
    agent,
    caller,
    containers,
    device_nodes,
    driver,
    gpus,
    ledger,
    machine,
    other_managers,
)
from mig_agent.doctor.examination import CHECKS, examine, run
from mig_agent.doctor.findings import CheckStatus, Finding, counts, ok, warning
from mig_agent.doctor.probe import DeniedError
from mig_agent.doctor.report import is_failed, to_json
from mig_agent.doctor.subject import Answered, Subject, within
from support.examined import ALICE, NOW, OFF, ROOT, found_by, gpu, only, process, status, subject, survey, tree

PCI = {"sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:3b:00.0/class": "0x030200\n"}
LOADED = {"sys/module/nvidia/version": "580.95.05\n"}


def leased(uuid: str = "MIG-00000000-0000-0000-0000-000000000001", state: str = "leased") -> Instance:
    return Instance(
        uuid=uuid,
        generation=1,
        profile="1g.10gb",
        memory_mib=9728,
        placement=Placement(0, 1),
        gpu_instance_id=1,
        compute_instance_id=0,
        state=state,
        lease="l1",
        holder="alice",
        tenant="alice",
        since=0.0,
        reason="",
        gpu="GPU-0",
        gpu_index=0,
    )


def known(*instances: Instance, index: int = 0, state: str = "ready", reason: str = "") -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        model="NVIDIA H100 80GB HBM3",
        mig=MigMode(capable=True, current=True, pending=True),
        state=state,
        reason=reason,
        memory_slices=8,
        memory_mib=81559,
        instances=instances,
    )


# The driver


def test_no_gpu_at_all(tmp_path: Path) -> None:
    (tmp_path / "sys/bus").mkdir(parents=True)
    found = only(driver.kernel_module, subject(tmp_path))
    assert (found.status, found.message) == ("failed", "this machine has no NVIDIA GPU on its PCI bus")
    assert "--simulate" in found.hint


def test_a_module_that_is_not_loaded(tmp_path: Path) -> None:
    found = only(driver.kernel_module, subject(tree(tmp_path, PCI)))
    assert (found.status, found.message) == ("failed", "the NVIDIA kernel module is not loaded")
    assert found.hint.startswith("sudo modprobe nvidia")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@b)",
    ],
)
def test_a_loaded_module(tmp_path: Path, line: str) -> None:
    of = subject(tree(tmp_path, {"proc/driver/nvidia/version": f"{line}\nGCC version: 13\n"}))
    assert only(driver.kernel_module, of).message == "the NVIDIA kernel module 580.95.05 is loaded"


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ModuleNotFoundError("No module named 'pynvml'"), "unknown", "nvidia-ml-py"),
        (TimeoutError("no answer within 20 s"), "failed", "the driver hangs"),
        (DriverError(DriverErrorKind.OUTDATED, "nvmlInit"), "failed", "updated and not reloaded"),
        (DriverError(DriverErrorKind.LIBRARY, "nvmlInit", "Shared Library Not Found"), "failed", "Not Found"),
        (DriverError(DriverErrorKind.UNKNOWN, "nvmlInit", "odd"), "failed", "odd"),
    ],
)
def test_nvml_that_cannot_be_used(tmp_path: Path, error: Exception, status: str, words: str) -> None:
    found = only(driver.nvml, subject(tree(tmp_path, LOADED), driver=error))
    assert found.status == status
    assert words in found.message
    assert found.hint


@pytest.mark.parametrize(
    ("version", "status"),
    [("450.80.02", "failed"), ("510.47", "warning"), ("550.1", "ok"), ("580.95.05", "ok"), ("", "unknown")],
)
def test_the_drivers_age(tmp_path: Path, version: str, status: str) -> None:
    assert only(driver.version, subject(tmp_path, driver=survey(driver=version))).status == status


def test_a_driver_that_was_replaced_under_the_agent(tmp_path: Path) -> None:
    of = subject(tmp_path, driver=survey(driver="590.1"), node=status())
    assert ("driver.agent-version", "warning") in found_by(driver.version, of)


def test_a_hung_call_ends_in_time() -> None:
    import threading  # noqa: PLC0415 -- only here

    never = threading.Event()
    assert isinstance(within(0.01, never.wait).error, TimeoutError)
    never.set()


# GPUs and MIG mode


def test_mig_mode_of_each_gpu(tmp_path: Path) -> None:
    of = subject(
        tmp_path,
        driver=survey(
            gpu(0),
            gpu(1, OFF),
            gpu(2, replace(OFF, pending=True)),
            gpu(3, replace(OFF, capable=False), "Tesla T4"),
            SurveyedGpu(index=4, error=DriverError(DriverErrorKind.GPU_LOST, "x", "GPU is lost")),
        ),
    )
    found = run(gpus.mig_mode, of)
    assert [each.status for each in found] == ["ok", "warning", "warning", "ok", "failed"]
    assert found[1].hint == "sudo nvidia-smi -i 1 -mig 1"
    assert "will be on after a reset" in found[2].message
    assert "--gpu-reset -i 2" in found[2].hint
    assert "GPU is lost" in found[4].message


def test_the_command_for_the_mode_is_migctls_where_the_agent_manages_the_gpu(tmp_path: Path) -> None:
    of = subject(tmp_path, driver=survey(gpu(0, OFF)), node=status(gpus=(known(),)))
    assert only(gpus.mig_mode, of).hint == "sudo migctl mode enable --gpu 0"


def test_a_gpu_that_fell_off_the_bus(tmp_path: Path) -> None:
    second = {name.replace("3b", "5e"): text for name, text in PCI.items()}
    of = subject(tree(tmp_path, PCI | second), driver=survey(gpu()))
    assert only(gpus.present, of).status is CheckStatus.FAILED


def test_what_the_agent_says_of_its_gpus(tmp_path: Path) -> None:
    node = status(
        gpus=(known(state="cordoned", reason="fan is loud"), known(leased(state="blocked"), index=1)),
        missing_gpus={2: "timeout"},
    )
    assert found_by(gpus.agents_view, subject(tmp_path, node=node)) == [
        ("gpu.state", "failed"),
        ("gpu.state", "warning"),
        ("gpu.blocked-instance", "warning"),
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("fan is loud", "GPU 0 is cordoned: fan is loud"),
        ("cordoned by root: fan is loud", "GPU 0 is cordoned by root: fan is loud"),
        ("drained by root", "GPU 0 is being drained by root"),
    ],
)
def test_why_a_gpu_is_cordoned_is_said_once(tmp_path: Path, reason: str, words: str) -> None:
    node = status(gpus=(known(state="cordoned", reason=reason),))
    assert only(gpus.agents_view, subject(tmp_path, node=node)).message == words


def test_where_only_rights_are_missing_it_says_so(tmp_path: Path) -> None:
    """A user has no rights where another one simulates the GPUs."""
    denied = subject(tmp_path, driver=PermissionError(13, "Permission denied", "/sim/gpus.lock"))
    for check in (gpus.present, device_nodes.driver_nodes):
        found = only(check, denied)
        assert found.message.endswith("/sim/gpus.lock: permission denied")
        assert "NVML" not in found.message


# Other managers


def test_no_other_manager(tmp_path: Path) -> None:
    of = subject(tmp_path, driver=survey(gpu()))
    assert only(other_managers.mig_manager, of).status is CheckStatus.OK
    assert only(other_managers.dcgm, of).status is CheckStatus.OK
    assert only(other_managers.persistence, of).hint == "sudo systemctl enable --now nvidia-persistenced"


def test_other_managers_are_named_without_their_arguments(tmp_path: Path) -> None:
    process(tmp_path, 11, "/usr/bin/nvidia-mig-manager --kubeconfig /secret")
    process(tmp_path, 12, "nv-hostengine -n --password=hunter2")
    process(tmp_path, 13, "/usr/bin/nvidia-persistenced --verbose")
    of = subject(tmp_path, driver=survey(gpu(0, OFF)))
    manager = only(other_managers.mig_manager, of)
    assert manager.status is CheckStatus.FAILED
    assert "nvidia-mig-manager (pid 11)" in manager.message
    dcgm = only(other_managers.dcgm, of)
    assert "nv-hostengine (pid 12)" in dcgm.message
    assert "stop nvidia-dcgm" in dcgm.hint
    persistence = only(other_managers.persistence, of)
    assert persistence.status is CheckStatus.OK
    assert not any(secret in str(each) for each in (manager, dcgm) for secret in ("hunter2", "/secret"))


def test_a_mig_manager_that_comes_back_at_boot(tmp_path: Path) -> None:
    tree(tmp_path, {"etc/systemd/system/multi-user.target.wants/nvidia-mig-manager.service": ""})
    assert only(other_managers.mig_manager, subject(tmp_path)).status is CheckStatus.WARNING


def test_who_holds_a_gpu_that_is_not_in_mig_mode(tmp_path: Path) -> None:
    process(tmp_path, 21, "python train.py --token=abc", "/dev/nvidia0", "/dev/nvidiactl")
    found = only(other_managers.gpu_holders, subject(tmp_path, driver=survey(gpu(0, OFF), gpu(1))))
    assert found.status is CheckStatus.WARNING
    assert "python (pid 21)" in found.message
    assert "abc" not in found.message


def test_who_holds_a_gpu_is_not_known_to_everybody(tmp_path: Path) -> None:
    found = only(other_managers.gpu_holders, subject(tmp_path, person=ALICE, driver=survey(gpu(0, OFF))))
    assert (found.status, found.hint) == ("unknown", "run it with sudo: sudo migctl doctor")


def test_foreign_instances(tmp_path: Path) -> None:
    node = status(gpus=(known(leased(state="foreign")),))
    assert only(other_managers.foreign_instances, subject(tmp_path, node=node)).hint.endswith("migctl adopt --gpu 0")


# Device nodes


def test_device_nodes(tmp_path: Path) -> None:
    tree(tmp_path, {"dev/nvidiactl": "", "dev/nvidia0": ""})
    of = subject(tmp_path, driver=survey(gpu()))
    missing = only(device_nodes.driver_nodes, of)
    assert (missing.status, missing.hint) == ("failed", "sudo nvidia-modprobe -u -c=0")
    tree(tmp_path, {"dev/nvidia-uvm": ""})
    assert only(device_nodes.driver_nodes, of).status is CheckStatus.OK


def test_capabilities_of_leased_instances(tmp_path: Path) -> None:
    of = subject(tmp_path, driver=survey(gpu()), node=status(gpus=(known(leased()),)))
    assert only(device_nodes.capabilities, of).status is CheckStatus.FAILED
    tree(
        tmp_path,
        {
            "proc/driver/nvidia-caps/mig-minors": "gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n",
            "proc/devices": "Character devices:\n240 nvidia-caps\n",
            "dev/nvidia-caps/nvidia-cap12": "",
        },
    )
    found = [each for each in run(device_nodes.capabilities, of) if each.status is CheckStatus.FAILED]
    assert [each.hint for each in found] == ["sudo mknod -m 444 /dev/nvidia-caps/nvidia-cap13 c 240 13"]


# Containers


def test_containers_without_the_toolkit(tmp_path: Path) -> None:
    tree(tmp_path, {"usr/bin/dockerd": ""})
    assert only(containers.toolkit, subject(tmp_path)).status is CheckStatus.WARNING
    tree(tmp_path, {"usr/bin/nvidia-ctk": "", "etc/docker/daemon.json": "{}"})
    assert found_by(containers.toolkit, subject(tmp_path)) == [
        ("containers.toolkit", "ok"),
        ("containers.docker", "warning"),
    ]


def test_a_stale_cdi_file(tmp_path: Path) -> None:
    there, gone = (f"MIG-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
    tree(tmp_path, {"var/run/cdi/nvidia.yaml": f"- {there}\n", "var/run/cdi/mig-agent-lease.json": gone})
    of = subject(tmp_path, node=status(gpus=(known(leased(there)),)), driver=survey(gpu()))
    assert only(containers.cdi, of).status is CheckStatus.OK
    tree(tmp_path, {"etc/cdi/nvidia.yaml": gone})
    assert "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml" in only(containers.cdi, of).hint
    with_unmanaged = replace(of, survey=Answered(value=survey(gpu(), gpu(1))))
    assert only(containers.cdi, with_unmanaged).status is CheckStatus.OK


# The caller and the socket


@pytest.fixture
def listening(tmp_path: Path) -> Path:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return path


def test_there_is_no_socket(tmp_path: Path) -> None:
    found = only(caller.socket, subject(tmp_path, person=ALICE))
    assert found.status is CheckStatus.FAILED
    assert "sudo systemctl start mig-agent" in found.hint


def test_the_group_of_the_socket(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listening.chmod(0o660)
    monkeypatch.setattr("mig_agent.doctor.checks.caller.group_name", lambda _: "gpu")
    gid = listening.stat().st_gid
    stranger = replace(ALICE, uid=listening.stat().st_uid + 60_000)
    person = {
        "member": replace(stranger, groups=frozenset({gid})),
        "later": replace(stranger, database_groups=frozenset({gid})),
        "stranger": stranger,
    }
    found = {
        name: only(caller.socket, subject(listening.parent, person=each, address=Address(listening)))
        for name, each in person.items()
    }
    assert found["member"].status is CheckStatus.OK
    assert found["later"].hint == "log in again, or newgrp gpu"
    assert found["stranger"].status is CheckStatus.FAILED
    if gid:
        assert found["stranger"].hint == "sudo usermod -aG gpu alice, then log in again"
    else:
        assert "set socket_group" in found["stranger"].hint


def test_another_machines_agent(tmp_path: Path) -> None:
    of = subject(tmp_path, node=status(), address=Address(host="gpu-17", port=7400))
    assert only(caller.address, of).status is CheckStatus.UNKNOWN


def test_the_group_database_of_this_user() -> None:
    me = os.geteuid()
    from mig_agent.doctor.probe import Person  # noqa: PLC0415 -- beside what it is compared with

    found = Person.current()
    assert found.uid == me
    assert os.getegid() in found.groups
    assert all(isinstance(grp.getgrgid(each).gr_name, str) for each in found.database_groups)


# Agent and ledger


def test_no_agent(tmp_path: Path) -> None:
    of = subject(tmp_path, node=NoAgent("cannot reach the agent at unix:///x: there is no such socket", "start it"))
    found = only(agent.serves, of)
    assert found.status is CheckStatus.FAILED
    assert found.hint.startswith("sudo systemctl start mig-agent")


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (None, "ok"),
        ("LoadState=not-found\nActiveState=inactive\n", "ok"),
        ("LoadState=loaded\nActiveState=failed\nUnitFileState=enabled\n", "failed"),
        ("LoadState=loaded\nActiveState=inactive\nUnitFileState=enabled\n", "failed"),
        ("LoadState=loaded\nActiveState=active\nUnitFileState=disabled\n", "warning"),
        ("LoadState=loaded\nActiveState=active\nUnitFileState=enabled\nNRestarts=0\n", "ok"),
    ],
)
def test_the_service(tmp_path: Path, answer: str | None, status: str) -> None:
    programs = {} if answer is None else {"systemctl": answer}
    assert only(agent.unit, subject(tmp_path, programs=programs)).status == status


def test_versions_that_differ(tmp_path: Path) -> None:
    assert only(agent.versions, subject(tmp_path, node=status(version="0.0.9"))).status is CheckStatus.WARNING


def test_a_paused_agent(tmp_path: Path) -> None:
    found = only(agent.state, subject(tmp_path, node=status(paused=("driver 590",))))
    assert (found.status, found.hint) == ("warning", "sudo migctl resume")


def test_settings_that_cannot_be_used(tmp_path: Path) -> None:
    mistake = FoundSettings(where="x", error=ConfigError("cannot use max_wating", "did you mean max_waiting?"))
    found = only(agent.settings, subject(tmp_path, found=mistake))
    assert (found.status, found.hint) == ("failed", "did you mean max_waiting?")


def test_the_ledgers_state(tmp_path: Path) -> None:
    doubt = LedgerDoubt(since=0.0, why="was damaged", kept_as="", restored=False)
    node = status(ledger_error="no space left on device", ledger_doubt=doubt)
    assert found_by(ledger.state, subject(tmp_path, node=node)) == [
        ("ledger.state", "failed"),
        ("ledger.state", "warning"),
    ]


def in_folder(folder: Path) -> FoundSettings:
    return FoundSettings(settings=Settings(state_dir=folder), where="the defaults")


def test_a_ledger_that_is_not_there_yet(tmp_path: Path) -> None:
    assert only(ledger.file, subject(tmp_path, found=in_folder(tmp_path / "none"))).status is CheckStatus.OK


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    tree(tmp_path, {"ledger.sqlite3": "not a database, though as long as one" * 100})
    found = only(ledger.file, subject(tmp_path, found=in_folder(tmp_path)))
    assert found.status is CheckStatus.FAILED
    assert "is damaged: file is not a database" in found.message
    assert "mig-agent restore FILE" in found.hint


# The machine


def test_cgroups(tmp_path: Path) -> None:
    assert only(machine.cgroups, subject(tmp_path)).status is CheckStatus.UNKNOWN
    tree(tmp_path, {"sys/fs/cgroup/memory/tasks": ""})
    assert only(machine.cgroups, subject(tmp_path)).status is CheckStatus.WARNING
    tree(tmp_path, {"sys/fs/cgroup/cgroup.controllers": "cpu memory"})
    assert only(machine.cgroups, subject(tmp_path)).status is CheckStatus.OK


@pytest.mark.parametrize(("answer", "status"), [("yes\n", "ok"), ("no\n", "warning"), (None, "unknown")])
def test_the_clock(tmp_path: Path, answer: str | None, status: str) -> None:
    programs = {} if answer is None else {"timedatectl": answer}
    assert only(machine.clock, subject(tmp_path, programs=programs)).status == status


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    assert only(machine.clock, subject(tmp_path, node=status(started_at=NOW + 3600))).status is CheckStatus.FAILED


def test_the_disk(tmp_path: Path) -> None:
    assert only(machine.disk, subject(tmp_path, found=in_folder(tmp_path / "not/yet"))).check == "machine.disk"
    assert only(machine.disk, subject(tmp_path)).status is CheckStatus.UNKNOWN


# All of them


def test_a_machine_with_nothing_gets_findings_and_no_traceback(tmp_path: Path) -> None:
    of = subject(tmp_path, person=ALICE, node=NoAgent("cannot reach it", ""), driver=ModuleNotFoundError("pynvml"))
    found = examine(of)
    assert set(found) == set(CHECKS)
    everything = [each for group in found.values() for each in group]
    assert not [each for each in everything if "cannot complete this check" in each.message]
    assert is_failed(found)
    assert sum(counts(everything).values()) == len(everything)
    told = to_json(of, found)
    assert isinstance(told, dict)
    assert list(told) == ["version", "agent_version", "address", "at", "as_root", "simulated", "summary", "findings"]


def test_every_finding_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    process(tmp_path, 11, "nvidia-mig-manager")
    of = subject(tmp_path, person=ROOT, driver=survey(gpu(0, OFF)), node=status(paused=("x",)))
    without = [
        each.message
        for group in examine(of).values()
        for each in group
        if each.status in {CheckStatus.FAILED, CheckStatus.WARNING} and not each.hint
    ]
    assert without == []


def denied(_of: Subject) -> list[Finding]:
    raise DeniedError(Path("/proc/1/environ"))


def broken(_of: Subject) -> list[Finding]:
    raise ZeroDivisionError


def test_a_check_that_fails_hides_no_other(tmp_path: Path) -> None:
    found = examine(subject(tmp_path, person=ALICE), {"All": (denied, broken, lambda _: [ok("fine", "it is")])})["All"]
    assert [each.status for each in found] == ["unknown", "unknown", "ok"]
    assert found[0].message == "cannot read /proc/1/environ: permission denied"
    assert "sudo" in found[0].hint


def test_colours_and_hints_for_people() -> None:
    from mig_agent.migctl.commands.doctor import _lines  # noqa: PLC0415 -- beside what it shows

    found = {"Group": (ok("a", "it is"), warning("b", "it is\x1b[2J not", "mend it"))}
    assert list(_lines(found, color=True, all_of_them=False)) == [
        "Group",
        "  \033[33mwarning\033[0m  it is\\u001b[2J not",
        "           -> mend it",
        "2 findings: 1 ok, 1 warning",
    ]
    assert list(_lines(found, color=False, all_of_them=True))[1] == "  ok       it is"
