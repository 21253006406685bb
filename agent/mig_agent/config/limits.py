"""The `limits` section of the configuration, read into `core.limits`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mig_agent.config.sections import Section, shown_path
from mig_agent.core.errors import ConfigError, UsageError
from mig_agent.core.limits import EVERY, Limit, LimitValue, LimitValues, UsageLimits
from mig_agent.core.quantities import parse_duration, parse_fraction, parse_memory, shown

SECTION: Final = "limits"
ROLES: Final = ("user", "scheduler", "admin")
"""The roles of callers, as `engine.callers.Role` has them; a test compares the two."""
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_PRIORITY = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


def _count(text: str) -> float:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise UsageError(f"cannot take {shown(text) or 'an empty text'} as a whole number", "write one such as 4")
    return int(text)


def _priority(text: str) -> float:
    if not _PRIORITY.fullmatch(text):
        raise UsageError(f"cannot take {shown(text) or 'an empty text'} as a priority", "write one such as 10 or -10")
    return int(text)


_PARSERS: Final[Mapping[Limit, Callable[[str], float]]] = MappingProxyType(
    {
        Limit.MEMORY: parse_memory,
        Limit.MEMORY_SLICES: _count,
        Limit.SHARE: parse_fraction,
        Limit.LEASES: _count,
        Limit.WAITING: _count,
        Limit.LONGEST_TTL: parse_duration,
        Limit.DEFAULT_TTL: parse_duration,
        Limit.LOWEST_PRIORITY: _priority,
        Limit.HIGHEST_PRIORITY: _priority,
    }
)


def limits_of(section: Section) -> UsageLimits:
    """Return the limits that a section sets. Raises ConfigError, which names the line of a mistake."""
    groups: dict[str, Mapping[str, LimitValues]] = {}
    for group in section.entries:
        if group not in {"roles", "users", "tenants"}:
            raise ConfigError(f"cannot use {section.place_of(group)}: {_nearest(group, ('roles', 'users', 'tenants'))}")
        within = section.section(group)
        for name in within.entries:
            if group == "roles" and name not in ROLES:
                raise ConfigError(f"cannot use {within.place_of(name)}: {_nearest(name, ROLES)}")
            if group == "users" and name == EVERY:
                raise ConfigError(
                    f"cannot use {within.place_of(name)}: it would be every user",
                    "limits.roles.user has the limits of each user without own ones",
                )
        groups[group] = MappingProxyType({name: _bounds(within.section(name)) for name in within.entries})
    return UsageLimits(**groups)


def _bounds(section: Section) -> LimitValues:
    known = tuple(each.value for each in Limit)
    bounds: dict[Limit, LimitValue] = {}
    for name in section.entries:
        if name not in known:
            raise ConfigError(f"cannot use {section.place_of(name)}: {_nearest(name, known)}")
        limit, text = Limit(name), section.text(name).strip()
        try:
            value = _PARSERS[limit](text)
        except UsageError as error:
            raise ConfigError(f"cannot use {section.place_of(name)}: {error.message}", error.hint) from error
        bounds[limit] = LimitValue(value=value, text=text, setting=section.place_of(name))
    for low, high in ((Limit.LOWEST_PRIORITY, Limit.HIGHEST_PRIORITY), (Limit.DEFAULT_TTL, Limit.LONGEST_TTL)):
        if low in bounds and high in bounds and bounds[low].value > bounds[high].value:
            raise ConfigError(
                f"cannot use {section.place_of(low.value)}: {bounds[low].text} is more than {high.value}, "
                f"{bounds[high].text}",
                "make one of them fit the other",
            )
    return MappingProxyType(bounds)


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"there is no such entry; {hint}"


def show_limits(value: object) -> str:
    """Return limits as YAML on one line, as the environment and flags take them."""
    if not isinstance(value, UsageLimits):
        return str(value)
    groups = {"roles": value.roles, "users": value.users, "tenants": value.tenants}
    parts = [
        f"{group}: {{{', '.join(f'{shown_path(name)}: {_shown_bounds(each)}' for name, each in found.items())}}}"
        for group, found in groups.items()
        if found
    ]
    return f"{{{', '.join(parts)}}}"


def _shown_bounds(bounds: LimitValues) -> str:
    return f"{{{', '.join(f'{name.value}: {each.text}' for name, each in bounds.items())}}}"
