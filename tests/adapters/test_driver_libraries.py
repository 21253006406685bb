"""The driver's libraries, as a container toolkit tells them: here a program that stands for `nvidia-ctk`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mig_agent.adapters import driver_libraries
from mig_agent.adapters.driver_libraries import DriverLibraries, Edits, NotNowError
from mig_agent.adapters.host import Host

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n"


@dataclass
class Machine:
    """A root with a toolkit in it that says what it is told to."""

    root: Path
    told: list[str] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.driver(VERSION)
        (self.root / "lib.so").touch()
        (self.root / "hook").touch()

    def driver(self, version: str) -> None:
        path = self.root / "proc/driver/nvidia/version"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(version)

    def toolkit(self, body: str, folder: str = "usr/bin") -> Path:
        """`body` is Python; `arguments` are those that it is called with. Each call leaves a line in `calls`."""
        path = self.root / folder / "nvidia-ctk"
        path.parent.mkdir(parents=True, exist_ok=True)
        script = (
            f"#!{sys.executable} -I\nimport json, os, sys, time\narguments = sys.argv[1:]\n"
            f"open({str(self.root / 'calls')!r}, 'a').write(' '.join(arguments) + chr(10))\n{body}\n"
        )
        path.write_text(script)
        path.chmod(0o755)
        return path

    def says(self, spec: object, folder: str = "usr/bin") -> Path:
        return self.toolkit(f"print({json.dumps(json.dumps(spec))})", folder)

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def libraries(self) -> DriverLibraries:
        return DriverLibraries(Host(self.root), self.told.append, machine=self.root, clock=lambda: self.now)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Its programs are run as they lie there: chroot is for root only, and would need an interpreter inside."""
    (tmp_path / "bin").mkdir()
    chroot = tmp_path / "bin/chroot"
    chroot.write_text('#!/bin/sh\nroot=$1; program=$2; shift 2\nexec "$root$program" "$@"\n')
    chroot.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return Machine(tmp_path / "machine")


def spec(**edits: object) -> dict[str, object]:
    return {
        "cdiVersion": "1.0.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
        "containerEdits": edits,
    }


MOUNT = {"hostPath": "/lib.so", "containerPath": "/usr/lib/lib.so", "options": ["ro", "nosuid", "nodev", "bind"]}
HOOK = {"hookName": "createContainer", "path": "/hook", "args": ["nvidia-cdi-hook", "update-ldcache"]}
WHOLE = spec(
    env=["NVIDIA_VISIBLE_DEVICES=void", "CUDA_VISIBLE_DEVICES=7", "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib"],
    deviceNodes=[{"path": "/dev/nvidiactl"}],
    mounts=[MOUNT | {"new": "unknown to 0.5.0"}],
    hooks=[HOOK | {"env": ["NVIDIA_CTK_DEBUG=false"], "timeout": None}],
)
FOUND = Edits(
    mounts=(MOUNT,), hooks=(HOOK | {"env": ["NVIDIA_CTK_DEBUG=false"]},), variables=("NVIDIA_CTK_LIBCUDA_DIR=/usr/lib",)
)


def test_what_is_taken_over(machine: Machine) -> None:
    """Mounts, hooks and variables; no devices, no nodes, and nothing of which devices are seen."""
    machine.says(WHOLE)
    libraries = machine.libraries()
    assert libraries.find() == FOUND
    assert libraries.find() == FOUND
    assert machine.calls == ["cdi generate --format=json"]
    assert not machine.told
    assert FOUND.as_cdi().keys() == {"env", "mounts", "hooks"}
    assert Edits().as_cdi() == {}


@pytest.mark.parametrize("change", ["driver", "toolkit", "files"])
def test_found_anew_after_a_change(machine: Machine, change: str) -> None:
    path = machine.says(WHOLE)
    libraries = machine.libraries()
    assert libraries.find() == FOUND
    match change:
        case "driver":
            machine.driver(VERSION.replace("580", "590"))
        case "toolkit":
            os.utime(path, (1, 1))
        case _:
            # The driver was removed and put somewhere else under the same version.
            (machine.root / "lib.so").rename(machine.root / "moved.so")
            machine.says(spec(mounts=[MOUNT | {"hostPath": "/moved.so"}]))
    assert libraries.find().mounts
    assert len(machine.calls) == 2
    libraries.find()
    assert len(machine.calls) == 2


def test_libraries_of_another_driver_are_never_given(machine: Machine) -> None:
    machine.says(WHOLE)
    libraries = machine.libraries()
    assert libraries.find() == FOUND
    machine.driver(VERSION.replace("580", "590"))
    machine.toolkit("sys.exit(1)")
    assert libraries.find() == Edits()


def test_the_toolkit_is_not_called_while_the_driver_is_let_go_of(machine: Machine) -> None:
    """It opens the driver, and may load it again in the middle of its replacement. What is known already will do."""
    machine.says(WHOLE)
    libraries = machine.libraries()
    libraries.driver_released = True
    with pytest.raises(NotNowError):
        libraries.find()
    libraries.driver_released = False
    assert libraries.find() == FOUND
    libraries.driver_released = True
    assert libraries.find() == FOUND
    machine.driver(VERSION.replace("580", "590"))
    with pytest.raises(NotNowError):
        libraries.find()
    assert len(machine.calls) == 1


def test_where_there_is_no_toolkit_the_pause_is_no_reason_to_wait(machine: Machine) -> None:
    libraries = machine.libraries()
    libraries.driver_released = True
    assert libraries.find() == Edits()


def test_where_there_is_no_toolkit(machine: Machine) -> None:
    libraries = machine.libraries()
    assert libraries.find() == Edits()
    assert libraries.find() == Edits()
    (words,) = machine.told
    assert words.startswith(
        "cannot give the driver's libraries to pods, which start without them: there is no nvidia-ctk"
    )
    assert "/usr/bin" in words
    machine.says(WHOLE)
    assert libraries.find() == FOUND


FAILURES = {
    "fails": ("print('NVML: no', file=sys.stderr); print('last words', file=sys.stderr); sys.exit(3)", "3: last words"),
    "says nothing": ("sys.exit(1)", "says nothing"),
    "no JSON": ("print('cdiVersion: 0.5.0')", "something else than CDI"),
    "no object": ("print('[1]')", "something else than CDI"),
    "no version": ("print('{}')", "something else than CDI"),
    "a mount without a path": (
        "print(json.dumps({'cdiVersion': '0.5.0', 'containerEdits': {'mounts': [{'hostPath': '/x'}]}}))",
        "something else than CDI",
    ),
    "edits that are none": ("print(json.dumps({'cdiVersion': '0.5.0', 'containerEdits': 'x'}))", "something else"),
}


@pytest.mark.parametrize(("body", "words"), FAILURES.values(), ids=FAILURES)
def test_a_toolkit_that_fails_keeps_nobody_waiting(machine: Machine, body: str, words: str) -> None:
    """It is told once, not asked again for a minute, and both its ways were tried."""
    machine.toolkit(body)
    libraries = machine.libraries()
    assert libraries.find() == Edits()
    assert libraries.find() == Edits()
    assert machine.calls == ["cdi generate --format=json", "cdi generate --format=json --mode=management"]
    assert len(machine.told) == 1
    assert words in machine.told[0]
    machine.now += 61
    assert libraries.find() == Edits()
    assert len(machine.calls) == 4
    assert len(machine.told) == 1
    machine.says(WHOLE)
    assert libraries.find() == FOUND


def test_the_second_way(machine: Machine) -> None:
    """Where NVML has no device to show, some versions end with an error."""
    machine.toolkit(f"sys.exit(1) if '--mode=management' not in arguments else print({json.dumps(json.dumps(WHOLE))})")
    libraries = machine.libraries()
    assert libraries.find() == libraries.find() == FOUND
    assert len(machine.calls) == 2
    assert not machine.told
    # There may be more to find once there is a device.
    machine.now += 61
    machine.says(spec(mounts=[MOUNT]))
    assert libraries.find() == Edits(mounts=(MOUNT,))
    machine.now += 1000
    libraries.find()
    assert len(machine.calls) == 3


def test_a_toolkit_that_hangs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_libraries, "MOST_SECONDS", 0.2)
    machine.toolkit("time.sleep(3600)")
    assert machine.libraries().find() == Edits()
    assert "did not end" in machine.told[0]


def test_a_toolkit_that_cannot_even_be_killed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in the driver: it is left behind, and the pod starts all the same."""
    killed: list[subprocess.Popen[bytes]] = []

    def spare(process: subprocess.Popen[bytes]) -> None:
        killed.append(process)

    monkeypatch.setattr(driver_libraries, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(driver_libraries, "_KILLED_SECONDS", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", spare)
        machine.toolkit("time.sleep(3600)")
        assert machine.libraries().find() == Edits()
    assert "did not end" in machine.told[0]
    assert killed
    for process in killed:
        assert process.poll() is None
        process.kill()
        process.wait()


def test_a_toolkit_that_cannot_be_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/no/such/chroot")
    machine.says(WHOLE)
    assert machine.libraries().find() == Edits()
    assert "cannot be run" in machine.told[0]


def test_a_driver_that_the_operator_brought(machine: Machine) -> None:
    machine.says(WHOLE, "usr/local/nvidia/toolkit")
    (machine.root / "run/nvidia/driver/usr/bin").mkdir(parents=True)
    assert machine.libraries().find() == FOUND
    assert machine.calls == ["cdi generate --format=json --driver-root=/run/nvidia/driver"]


def test_on_the_machine_itself_nothing_is_entered(tmp_path: Path) -> None:
    """Also where the first process's root may not be looked at."""
    libraries = DriverLibraries(Host(tmp_path), lambda _: None, machine=Path("/"))
    assert libraries._root() == Path("/")
    libraries = DriverLibraries(Host(tmp_path), lambda _: None, machine=tmp_path / "nothing")
    assert libraries._root() == Path("/")
    assert DriverLibraries(Host(tmp_path), lambda _: None, machine=tmp_path)._root() == tmp_path
