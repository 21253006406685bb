"""Checks of the way from this user to the agent: the socket, its group, and certificates over TCP."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mig_agent.doctor.agent_settings import CONFIG_FILE
from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.probe import DeniedError, group_name, user_name
from mig_agent.doctor.subject import Subject

if TYPE_CHECKING:
    import os
    from pathlib import Path


def socket(subject: Subject) -> Iterator[Finding]:
    """Check that the agent's socket is there and that this user may use it."""
    name, path = "caller.socket", subject.address.path
    if path is None:
        yield ok(name, f"the agent is asked over TCP at {subject.address}")
        return
    try:
        found = path.stat()
    except FileNotFoundError:
        yield failed(
            name,
            f"there is no socket {path}: no agent runs, or it listens elsewhere",
            "sudo systemctl start mig-agent, or name another with --address or MIG_AGENT_ADDRESS",
        )
        return
    except PermissionError as error:
        raise DeniedError(path) from error
    if not stat.S_ISSOCK(found.st_mode):
        yield failed(name, f"{path} is no socket", "give another with --address or MIG_AGENT_ADDRESS")
        return
    yield _access(subject, path, found)


def _access(subject: Subject, path: Path, found: os.stat_result) -> Finding:
    name, person = "caller.socket", subject.probe.person
    owner, group = user_name(found.st_uid), group_name(found.st_gid)
    shape = f"{path} ({owner}:{group}, {stat.S_IMODE(found.st_mode):04o})"
    both = stat.S_IROTH | stat.S_IWOTH
    if person.is_root or person.uid == found.st_uid or found.st_mode & both == both:
        return ok(name, f"{person.name} may use {shape}")
    shared = stat.S_IRGRP | stat.S_IWGRP
    if found.st_mode & shared != shared:
        return failed(
            name,
            f"only {owner} may use {shape}",
            f"set socket_mode: 0660 in {CONFIG_FILE}; sudo systemctl reload mig-agent",
        )
    if found.st_gid in person.groups:
        return ok(name, f"{person.name} may use {shape} as a member of {group}")
    if found.st_gid in person.database_groups:
        return failed(
            name,
            f"{person.name} is a member of {group} since this login began, and it does not count yet: {shape}",
            f"log in again, or newgrp {group}",
        )
    if found.st_gid == 0:
        return failed(
            name,
            f"only root may use {shape}: no group was set for users",
            f"sudo groupadd --system mig-agent; set socket_group: mig-agent in {CONFIG_FILE}; "
            f"sudo usermod -aG mig-agent {person.name}; sudo systemctl restart mig-agent; log in again",
        )
    return failed(
        name,
        f"{person.name} is no member of {group}, to which {shape} belongs",
        f"sudo usermod -aG {group} {person.name}, then log in again",
    )


def rights(subject: Subject) -> Iterator[Finding]:
    """Check whether this user is root, since others cannot see everything."""
    person = subject.probe.person
    if person.is_root:
        yield ok("caller.rights", "checked as root: nothing is hidden")
    else:
        yield ok(
            "caller.rights", f"checked as {person.name}: some things can be seen by root alone", "sudo migctl doctor"
        )


def address(subject: Subject) -> Iterator[Finding]:
    """Check that this machine's agent is the one that is asked."""
    variable = subject.probe.environment.get("MIG_AGENT_ADDRESS")
    path = subject.address.path
    if variable and subject.node is None and (path is None or not path.exists()):
        yield warning(
            "caller.address",
            f"MIG_AGENT_ADDRESS is set to {variable}, where no agent answers",
            "unset MIG_AGENT_ADDRESS",
        )
    elif path is None and subject.node is not None:
        yield unknown(
            "caller.address",
            f"the agent is on another machine ({subject.node.node}), and this one was examined",
            f"run migctl doctor on {subject.node.node}",
        )
