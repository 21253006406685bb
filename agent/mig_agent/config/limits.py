"""The `limits` section of the configuration, read into `core.limits`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from mig_agent.config.problems import InvalidConfigError, Problem
from mig_agent.config.sections import Section, collecting, shown_path
from mig_agent.core.errors import UsageError
from mig_agent.core.limits import EVERY, Limit, LimitValue, LimitValues, UsageLimits
from mig_agent.core.quantities import parse_duration, parse_fraction, parse_memory, shown

SECTION: Final = "limits"
EXAMPLE: Final = "{users: {alice: {leases: 4}}}"
_GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "roles": "{user: {leases: 4}}",
        "users": "{alice: {leases: 4}}",
        "tenants": "{vision: {leases: 4}}",
    }
)
"""The names directly below the section, each with an example."""
_EXAMPLE_OF_ONE: Final = "{leases: 4}"
ROLES: Final = ("user", "scheduler", "admin")
"""The roles of callers, as `engine.callers.Role` has them; a test compares the two."""
_UNKNOWN: Final = "there is no such entry"
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


def _share(text: str) -> float:
    try:
        return parse_fraction(text)
    except UsageError as error:
        message = error.message.replace("a fraction of a GPU", "a share of the node")
        raise UsageError(message, "write a number above 0 and up to 1, such as 0.5") from error


_ORDERED: Final = ((Limit.LOWEST_PRIORITY, Limit.HIGHEST_PRIORITY), (Limit.DEFAULT_TTL, Limit.LONGEST_TTL))
"""Limits of which the first may not be above the second."""
_PARSERS: Final[Mapping[Limit, tuple[Callable[[str], float], str]]] = MappingProxyType(
    {
        Limit.MEMORY: (parse_memory, "80Gi"),
        Limit.MEMORY_SLICES: (_count, "14"),
        Limit.SHARE: (_share, "0.5"),
        Limit.LEASES: (_count, "4"),
        Limit.WAITING: (_count, "20"),
        Limit.LONGEST_TTL: (parse_duration, "7d"),
        Limit.DEFAULT_TTL: (parse_duration, "1d"),
        Limit.LOWEST_PRIORITY: (_priority, "0"),
        Limit.HIGHEST_PRIORITY: (_priority, "10"),
    }
)
"""Parser of each limit's value, and an example."""


def limits_of(section: Section) -> UsageLimits:
    """Return the limits that a section sets. Raises InvalidConfigError, with all mistakes and their lines."""
    problems = [*section.problems]
    groups: dict[str, Mapping[str, LimitValues]] = {}
    for group in section.entries:
        with collecting(problems):
            if group not in _GROUPS:
                raise section.mistake(group, _UNKNOWN, _nearest(group, tuple(_GROUPS)))
            groups[group] = _group(group, section.section(group, _GROUPS[group]), problems)
    if problems:
        raise InvalidConfigError(sorted(problems, key=lambda each: each.line or 0))
    return UsageLimits(**groups)


def _group(group: str, section: Section, problems: list[Problem]) -> Mapping[str, LimitValues]:
    problems += section.problems
    found: dict[str, LimitValues] = {}
    for name in section.entries:
        with collecting(problems):
            if group == "roles" and name not in ROLES:
                raise section.mistake(name, _UNKNOWN, _nearest(name, ROLES))
            if group == "users" and name == EVERY:
                raise section.mistake(
                    name,
                    "it would be every user",
                    "write it as limits.roles.user: that has the limits of each user without own ones",
                )
            found[name] = _bounds(section.section(name, _EXAMPLE_OF_ONE), problems)
    return MappingProxyType(found)


def _bounds(section: Section, problems: list[Problem]) -> LimitValues:
    problems += section.problems
    known = tuple(each.value for each in Limit)
    bounds: dict[Limit, LimitValue] = {}
    for name in section.entries:
        with collecting(problems):
            if name not in known:
                raise section.mistake(name, _UNKNOWN, _nearest(name, known))
            limit = Limit(name)
            parse, example = _PARSERS[limit]
            text = section.text(name, example).strip()
            try:
                value = parse(text)
            except UsageError as error:
                raise section.mistake(name, error.message, error.hint) from error
            bounds[limit] = LimitValue(value=value, text=text, setting=section.place_of(name))
    for low, high in _ORDERED:
        with collecting(problems):
            if low in bounds and high in bounds and bounds[low].value > bounds[high].value:
                raise section.mistake(
                    low.value,
                    f"{bounds[low].text} is more than {high.value}, {bounds[high].text}",
                    f"write {low.value}: {bounds[high].text} or less, or raise {high.value}",
                )
    return MappingProxyType(bounds)


def contradictions(limits: UsageLimits, role_of: Callable[[str], str]) -> Iterator[Problem]:
    """Yield the limits of a user that contradict those of the user's role, and of a tenant those of each tenant.

    Only what is set in two places is looked at; `role_of` returns the role of a user.
    """
    for name, own in limits.users.items():
        yield from _contradicting(name, own, limits.roles.get(role_of(name), {}))
    for name, own in limits.tenants.items():
        if name != EVERY:
            yield from _contradicting(name, own, limits.tenants.get(EVERY, {}))


def _contradicting(name: str, own: LimitValues, general: LimitValues) -> Iterator[Problem]:
    for low, high in _ORDERED:
        for mine, other, words in ((low, high, "more"), (high, low, "less")):
            if mine not in own or other in own or other not in general:
                continue
            value, bound = own[mine], general[other]
            if (value.value > bound.value) if mine is low else (value.value < bound.value):
                path = value.setting.partition(" in ")[0]
                yield Problem(
                    message=f"cannot use {value.setting}: {value.text} is {words} than {bound.text}, which "
                    f"{bound.setting} sets for {shown(name)}, too",
                    hint=f"write {path}: {bound.text}, or set {path.removesuffix(mine.value)}{other.value}, too",
                    setting=SECTION,
                )


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


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
