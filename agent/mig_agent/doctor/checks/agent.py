"""Checks of the agent: whether it runs and serves, its version and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mig_agent import __version__
from mig_agent.client import ClientError
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import counted
from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.probe import SUDO_HINT
from mig_agent.doctor.subject import AGENT_SECONDS, Subject, words_of

_UNIT: Final = "mig-agent.service"
_JOURNAL: Final = "sudo journalctl -u mig-agent -n 50"


def serves(subject: Subject) -> Iterator[Finding]:
    """Check that the agent answers."""
    name, node, error = "agent.serves", subject.node, subject.status.error
    if node is not None:
        yield ok(name, f"the agent of {node.node} answers at {subject.address}")
        return
    hint = f"sudo systemctl start mig-agent; {_JOURNAL} tells why it ended"
    if isinstance(error, TimeoutError):
        yield failed(
            name,
            f"the agent has not answered within {AGENT_SECONDS:g} s: it hangs",
            f"{_JOURNAL}; sudo systemctl restart mig-agent",
        )
    elif isinstance(error, (ClientError, UsageError)):
        if "permission denied" in error.message:  # `caller.socket` says what to do
            yield unknown(name, error.message, SUDO_HINT)
        else:
            yield failed(name, error.message, error.hint if subject.address.path is None else hint)
    else:
        yield failed(name, f"the agent does not answer: {words_of(error)}", hint)


def unit(subject: Subject) -> Iterator[Finding]:
    """Check the service of systemd, if there is one."""
    name = "agent.service"
    answer = subject.probe.run(("systemctl", "show", _UNIT, "--property=LoadState,ActiveState,UnitFileState,NRestarts"))
    facts = dict(line.partition("=")[::2] for line in (answer or "").splitlines())
    if facts.get("LoadState") != "loaded":
        yield ok(name, "no service of systemd is installed: the agent is started in another way")
        return
    active, enabled = facts.get("ActiveState", ""), facts.get("UnitFileState", "")
    if active == "failed" or (active == "activating" and subject.node is None):
        yield failed(name, f"{_UNIT} is {active}", _JOURNAL)
    elif active != "active":
        yield failed(name, f"{_UNIT} is {active or 'not running'}", "sudo systemctl start mig-agent")
    elif enabled not in {"enabled", "enabled-runtime"}:
        yield warning(name, f"{_UNIT} runs, and is not started at boot", "sudo systemctl enable mig-agent")
    else:
        restarts = facts.get("NRestarts", "0")
        again = f", and was restarted {restarts} times" if restarts not in {"", "0"} else ""
        yield ok(name, f"{_UNIT} is active{again}", _JOURNAL if again else "")


def versions(subject: Subject) -> Iterator[Finding]:
    """Check that agent and client are of one version."""
    name, node = "agent.version", subject.node
    if node is None:
        yield unknown(name, f"migctl is {__version__}; the agent's version is not known")
    elif node.version != __version__:
        yield warning(
            name,
            f"the agent is {node.version or 'of an old version'}, and migctl is {__version__}",
            "install one version of both, then sudo systemctl restart mig-agent",
        )
    else:
        yield ok(name, f"agent and migctl are {__version__}")


def state(subject: Subject) -> Iterator[Finding]:
    """Check whether the agent grants leases, and if not, why."""
    node = subject.node
    if node is None:
        return
    if node.paused:
        yield warning("agent.paused", f"the agent is paused: {'; '.join(node.paused)}", "sudo migctl resume")
    for each in node.socket_problems:
        yield failed("agent.sockets", f"the socket {each}", "remove what is in its place; the agent binds it again")
    if not node.paused and not node.ledger_error and not node.socket_problems:
        waiting = f", {len(node.queue)} waiting" if node.queue else ""
        yield ok("agent.state", f"the agent grants leases: {counted(len(node.leases), 'lease')} now{waiting}")


def settings(subject: Subject) -> Iterator[Finding]:
    """Check that the settings can be used."""
    name, found = "agent.settings", subject.found
    if found.error is not None:
        if "Permission denied" in found.error.message:
            yield unknown(name, found.error.message, SUDO_HINT)
        elif "installed without" in found.error.message:
            yield unknown(name, found.error.message, found.error.hint)
        else:
            yield failed(name, found.error.message, found.error.hint)
        return
    of = "" if found.settings is None else f": {counted(len(found.given), 'setting')} given"
    partly = "; its environment is hidden from this user" if found.partly else ""
    yield ok(name, f"settings of {found.where}{of}{partly}")
