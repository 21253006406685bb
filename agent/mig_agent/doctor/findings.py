"""Findings: what a check has found, how bad it is, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """How bad a finding is. The values are in `migctl doctor -o json`; never rename one."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could, or not for long."""
    FAILED = "failed"
    """Requests for GPUs fail until this is mended."""
    UNKNOWN = "unknown"
    """It could not be checked; the hint says what is needed for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check."""

    check: str
    """The stable name for programs: `gpu.mig-mode`."""
    status: CheckStatus
    message: str
    """A sentence for people."""
    hint: str = ""
    """The command that mends it, or what to do; empty if nothing needs to be done."""


def ok(check: str, message: str, hint: str = "") -> Finding:
    """Return a finding of something that is as it should be."""
    return Finding(check=check, status=CheckStatus.OK, message=message, hint=hint)


def warning(check: str, message: str, hint: str = "") -> Finding:
    """Return a finding of something that works, but not as well as it could."""
    return Finding(check=check, status=CheckStatus.WARNING, message=message, hint=hint)


def failed(check: str, message: str, hint: str = "") -> Finding:
    """Return a finding of something that keeps the agent from its work."""
    return Finding(check=check, status=CheckStatus.FAILED, message=message, hint=hint)


def unknown(check: str, message: str, hint: str = "") -> Finding:
    """Return a finding of something that could not be checked."""
    return Finding(check=check, status=CheckStatus.UNKNOWN, message=message, hint=hint)


def counts(findings: Iterable[Finding]) -> dict[CheckStatus, int]:
    """Return the number of findings of each status, those with none included."""
    found = list(findings)
    return {status: sum(each.status is status for each in found) for status in CheckStatus}
