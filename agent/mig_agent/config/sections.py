"""Sections: settings that are YAML mappings, with the line of each entry for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import yaml

from mig_agent.config.problems import InvalidConfigError, Problem
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown

_DEEPEST: Final = 8
"""Levels of names below a section; by references to itself YAML can be of any depth."""


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of names to texts or further mappings, as it was written."""

    entries: Mapping[str, str | Section | None]
    """Marks a value that no entry takes, such as a list, as None."""
    lines: Mapping[str, int]
    """The line of each entry; 0 where the section does not come from a file."""
    name: str
    """The names that lead here: `limits.users.alice`."""
    source: str
    """The file; empty where the section does not come from one."""
    problems: tuple[Problem, ...] = ()
    """Mistakes in how this mapping is written; those of the mappings below are theirs."""

    def path_of(self, entry: str) -> str:
        """Return an entry's full name: `limits.users.alice.memory`."""
        return f"{self.name}.{entry}"

    def place_of(self, entry: str) -> str:
        """Return an entry's full name with its file and line, for messages."""
        where = f" in {self.source}, line {self.lines[entry]}" if self.source else ""
        return f"{shown_path(self.path_of(entry))}{where}"

    def mistake(self, entry: str, what: str, hint: str) -> InvalidConfigError:
        """Return the error to raise for a mistake in an entry."""
        message = f"cannot use {self.place_of(entry)}: {what}"
        return InvalidConfigError(
            [Problem(message=message, hint=hint, line=self.lines[entry] if self.source else None)]
        )

    def section(self, entry: str, example: str) -> Section:
        """Return an entry that must be a mapping, such as `example`; one with nothing below it is empty.

        Raises InvalidConfigError.
        """
        found = self.entries[entry]
        if isinstance(found, Section):
            return found
        if found == "":
            return Section({}, {}, self.path_of(entry), self.source)
        raise self.mistake(entry, "it takes names with values below it", f"write {shown(entry)}: {example}")

    def text(self, entry: str, example: str) -> str:
        """Return an entry that must be a plain value, such as `example`. Raises InvalidConfigError."""
        found = self.entries[entry]
        if isinstance(found, str):
            return found
        raise self.mistake(
            entry, "it takes one value, no list and no names with values", f"write {shown(entry)}: {example}"
        )


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Add the mistakes that are raised inside to a list, and go on behind it."""
    try:
        yield
    except InvalidConfigError as error:
        problems += error.problems


def shown_path(path: str) -> str:
    """Return the full name of an entry for messages, each part on one line and not too long."""
    return ".".join(map(shown, path.split(".")))


def section_of(node: yaml.MappingNode, name: str, source: str, *, depth: int = _DEEPEST) -> Section:
    """Return a mapping node as a section, with its mistakes in it."""
    section = Section({}, {}, name, source)
    entries: dict[str, str | Section | None] = {}
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    for key, value in node.value:
        entry = str(key.value) if isinstance(key, yaml.ScalarNode) else "this key"
        here = replace(section, lines={entry: key.start_mark.line + 1})
        with collecting(problems):
            if entry in entries:
                raise here.mistake(entry, "it is set twice", "remove one of them")
            if isinstance(value, yaml.ScalarNode):
                entries[entry] = str(value.value)
            elif isinstance(value, yaml.MappingNode) and depth:
                entries[entry] = section_of(value, here.path_of(entry), source, depth=depth - 1)
            else:
                entries[entry] = None
            lines[entry] = here.lines[entry]
    return replace(section, entries=entries, lines=lines, problems=tuple(problems))


def section_in(text: str, name: str, example: str) -> Section:
    """Return the section that a text of a flag or a variable holds, as YAML on one line. Raises UsageError."""
    hint = f"write {example}"
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"cannot take {shown(text)}: it is no YAML", hint) from error
    except RecursionError as error:
        raise UsageError(f"cannot take {shown(text)}: it is nested too deeply", hint) from error
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"cannot take {shown(text) or 'an empty text'}: it holds no names with values", hint)
    return section_of(node, name, "")
