"""Compares the settings in use with the configuration as it is now: which changes a running agent takes up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mig_agent.config.field_types import Row
from mig_agent.config.settings import ROWS, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One setting with another value than the one in use."""

    name: str
    before: str
    """The values as people write them; `not set` where there is none."""
    after: str

    def __str__(self) -> str:
        return f"{self.name} is {self.after} (was {self.before})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanges:
    """All differences, and the settings that result for the running agent."""

    live: tuple[SettingChange, ...]
    """Those that take effect while the agent runs."""
    at_restart: tuple[SettingChange, ...]
    """Those that only a restart brings into effect."""
    settings: Settings
    """The settings in use with the live changes made."""


def compare(used: Settings, wanted: Settings) -> SettingChanges:
    """Return what is different in the wanted settings, in the order of the table."""
    live: list[SettingChange] = []
    at_restart: list[SettingChange] = []
    values: dict[str, Any] = {}
    before, after = _values(used), _values(wanted)
    for name, row in ROWS.items():
        if before[name] == after[name]:
            continue
        change = SettingChange(name=name, before=_written(row, before[name]), after=_written(row, after[name]))
        (live if row.live else at_restart).append(change)
        if row.live:
            values[name] = after[name]
    return SettingChanges(live=tuple(live), at_restart=tuple(at_restart), settings=replace(used, **values))


def _values(settings: Settings) -> Mapping[str, object]:
    return {each.name: getattr(settings, each.name) for each in fields(settings)}


def _written(row: Row, value: object) -> str:
    if row.when_unset and value in (None, "", ()):
        return "not set"
    return row.kind.write(value) or "empty"
