"""The package comes, is replaced and goes: leases outlive an upgrade and a removal, and a purge leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.agent import PROCESS_SECONDS, eventually
from support.machine import Machine

_FILES = (
    "find / -xdev \\( -path /proc -o -path /sys -o -path /run -o -path /tmp -o -path /dev \\) -prune -o -print | sort"
)
_APTS_OWN = ("/var/lib/dpkg/", "/var/lib/apt/", "/var/cache/", "/var/log/", "/root", "/var/lib/systemd/", "/home/")
"""Where apt, dpkg and systemd keep what they remember."""


@pytest.fixture(scope="module")
def before(machine: Machine) -> set[str]:
    """All files of the machine before the package came."""
    return _files(machine)


def _files(machine: Machine) -> set[str]:
    return {path for path in machine.run(_FILES).splitlines() if not path.startswith(_APTS_OWN)}


def _leases(machine: Machine) -> list[str]:
    return [each["lease"] for each in json.loads(machine.run("migctl status -o json"))["leases"]]


@contextmanager
def _offered(machine: Machine, package: Path) -> Iterator[str]:
    """The path of a package on the machine."""
    there = machine.shared / "another.deb"
    there.hardlink_to(package)
    yield "/mnt/another.deb"
    there.unlink()


def test_an_upgrade_keeps_leases_and_what_runs(before: set[str], installed: Machine, next_package: Path) -> None:
    assert before
    lease = json.loads(installed.run("migctl request --gpu-memory 4G -o json", user="alice"))["lease"]
    waiting = "until test -e /tmp/upgraded; do sleep 0.1; done; echo done"
    job = installed.start(f"migctl run --gpu-memory 4G -- sh -c '{waiting}'", user="alice")
    running = eventually(lambda: len(_leases(installed)) == len(("requested", "running")) and {*_leases(installed)})
    with _offered(installed, next_package) as path:
        told = installed.run(f"apt install {path}")
    assert "cannot call the agent ready" not in told
    assert lease in running == {*_leases(installed)}
    installed.run("touch /tmp/upgraded")
    # Where the upgrade takes long, it has said before that the agent is away, and that it is back.
    assert job.communicate(timeout=PROCESS_SECONDS)[0].endswith("done\n")
    assert _leases(installed) == [lease]
    installed.run("rm /tmp/upgraded")
    assert installed.run("cat /etc/mig-agent/config.yaml").count("simulate") == 1, "the administrator's own"


def test_an_upgrade_starts_nothing_that_the_administrator_stopped(installed: Machine, next_package: Path) -> None:
    installed.run("systemctl stop mig-agent")
    with _offered(installed, next_package) as path:
        installed.run(f"apt install --reinstall {path}")
    assert installed.run("systemctl is-active mig-agent", code=3).strip() == "inactive"
    assert installed.run("systemctl is-enabled mig-agent").strip() == "enabled"
    installed.run("systemctl start mig-agent")


def test_removing_keeps_the_leases_for_another_installation(installed: Machine) -> None:
    (lease,) = _leases(installed)
    installed.run("apt remove mig-agent")
    installed.run("test ! -e /usr/bin/mig-agent -a ! -e /usr/lib/mig-agent -a ! -e /run/mig-agent/mig-agent.sock")
    assert installed.run("systemctl is-active mig-agent", code=None).strip() == "inactive"
    installed.run("test -e /var/lib/mig-agent/ledger.sqlite3 -a -e /etc/mig-agent/config.yaml")
    installed.run("apt install /mnt/mig-agent_*.deb")
    assert _leases(installed) == [lease]


def test_a_purge_leaves_nothing(before: set[str], installed: Machine) -> None:
    installed.run("apt purge mig-agent")
    assert _files(installed) == before
    installed.run("getent group mig-agent", code=2)
    assert not installed.run("find /run /tmp -name '*mig-agent*'").strip()
    assert "mig-agent" not in installed.run("systemctl list-units --all --plain --no-legend")


def test_it_is_installed_where_systemd_is_not_process_1(installed: Machine) -> None:
    """As in the image of a container, or a system that is being put together."""
    hidden = "unshare --mount --fork sh -ec 'mount -t tmpfs tmpfs /run; apt {}; apt purge mig-agent'"
    told = installed.run(hidden.format("install /mnt/mig-agent_*.deb"))
    assert "cannot call the agent ready" not in told
    installed.run("test ! -e /etc/mig-agent -a ! -e /var/lib/mig-agent")
