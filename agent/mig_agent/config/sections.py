"""Sections: settings that are YAML mappings, with the line of each entry for messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import yaml

from mig_agent.core.errors import ConfigError, UsageError
from mig_agent.core.quantities import shown


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of names to texts or further mappings, as it was written."""

    entries: Mapping[str, str | Section]
    lines: Mapping[str, int]
    """The line of each entry; 0 where the section does not come from a file."""
    name: str
    """The names that lead here: `limits.users.alice`."""
    source: str
    """The file; empty where the section does not come from one."""

    def path_of(self, entry: str) -> str:
        """Return an entry's full name: `limits.users.alice.memory`."""
        return f"{self.name}.{entry}"

    def place_of(self, entry: str) -> str:
        """Return an entry's full name with its file and line, for messages."""
        where = f" in {self.source}, line {self.lines[entry]}" if self.source else ""
        return f"{shown_path(self.path_of(entry))}{where}"

    def section(self, entry: str) -> Section:
        """Return an entry that must be a mapping. Raises ConfigError."""
        found = self.entries[entry]
        if isinstance(found, Section):
            return found
        raise ConfigError(
            f"cannot use {self.place_of(entry)}: it takes names with values below it",
            "docs/configuration.md has an example",
        )

    def text(self, entry: str) -> str:
        """Return an entry that must be a plain value. Raises ConfigError."""
        found = self.entries[entry]
        if isinstance(found, str):
            return found
        raise ConfigError(f"cannot use {self.place_of(entry)}: it takes one value", "docs/configuration.md lists them")


def shown_path(path: str) -> str:
    """Return the full name of an entry for messages, each part on one line and not too long."""
    return ".".join(map(shown, path.split(".")))


def section_of(node: yaml.Node | None, name: str, source: str) -> Section:
    """Return a mapping node as a section. Raises ConfigError."""
    empty = Section({}, {}, name, source)
    if not isinstance(node, yaml.MappingNode):
        raise UsageError("cannot take this: it holds no names with values", "docs/configuration.md has an example")
    entries: dict[str, str | Section] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        entry = str(key.value) if isinstance(key, yaml.ScalarNode) else "this key"
        here = replace(empty, lines={entry: key.start_mark.line + 1})
        if entry in entries:
            raise ConfigError(f"cannot use {here.place_of(entry)}: it is set twice", "remove one of them")
        if isinstance(value, yaml.ScalarNode):
            entries[entry] = str(value.value)
        elif isinstance(value, yaml.MappingNode):
            entries[entry] = section_of(value, f"{name}.{entry}", source)
        else:
            raise ConfigError(
                f"cannot use {here.place_of(entry)}: it takes a value or names with values, no list",
                "docs/configuration.md has an example",
            )
        lines[entry] = here.lines[entry]
    return Section(entries, lines, name, source)


def section_in(text: str, name: str) -> Section:
    """Return the section that a text of a flag or a variable holds, as YAML on one line. Raises UsageError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"cannot take {shown(text)}: it is no YAML", "write {name: {name: value}}") from error
    return section_of(node, name, "")
