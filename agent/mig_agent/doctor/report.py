"""The result of an examination for programs: the JSON of `migctl doctor -o json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mig_agent import __version__
from mig_agent.client.to_json import Json, moment
from mig_agent.doctor.findings import CheckStatus, Finding, counts
from mig_agent.doctor.subject import Subject


def is_failed(found: Mapping[str, Iterable[Finding]]) -> bool:
    """Return True if something keeps the agent from its work."""
    return any(each.status is CheckStatus.FAILED for group in found.values() for each in group)


def to_json(subject: Subject, found: Mapping[str, Iterable[Finding]]) -> Json:
    """Return the findings as JSON. Keys and names of checks stay; checks are added."""
    everything = [each for group in found.values() for each in group]
    return {
        "version": __version__,
        "agent_version": None if subject.node is None else subject.node.version,
        "address": str(subject.address),
        "at": moment(subject.now),
        "as_root": subject.probe.person.is_root,
        "simulated": subject.simulated,
        "summary": {str(status): number for status, number in counts(everything).items()},
        "findings": [
            {
                "check": each.check,
                "group": heading,
                "status": str(each.status),
                "message": each.message,
                "hint": each.hint or None,
            }
            for heading, group in found.items()
            for each in group
        ],
    }
