"""The Debian package, and machines to install it on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.debian import build, next_version
from support.machine import Machine

GPUS = 'simulate: "a100-80gb:1,h100-80gb:1"'
"""The line of the configuration that stands for real GPUs."""
PEOPLE = ("alice", "dave")
"""Alice is to be in the group, Dave is not."""


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def next_package(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a higher version, as an upgrade."""
    return next_version(package, tmp_path_factory.mktemp("next"))


@pytest.fixture(scope="module")
def machine(package: Path) -> Iterator[Machine]:
    """A machine as Debian leaves it, with two users and the package in /mnt; its administrator answers apt with yes."""
    with Machine() as running:
        for user in PEOPLE:
            running.run(f"useradd --create-home --shell /bin/bash {user}")
        running.run("""echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/90yes""")
        (running.shared / package.name).hardlink_to(package)
        yield running


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Machine:
    """A machine with the package, simulated GPUs, and Alice in the group."""
    machine.run("apt install /mnt/mig-agent_*.deb")
    machine.run(f"echo '{GPUS}' >>/etc/mig-agent/config.yaml")
    machine.run("systemctl restart mig-agent && adduser alice mig-agent")
    return machine
