"""Mistakes in a configuration, as values, so that all of them can be reported at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mig_agent.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake in the configuration."""

    message: str
    """A sentence for people, which names the place as far as it is known."""
    hint: str = ""
    setting: str = ""
    """The setting that it is about; empty for a file that cannot be read, or a name that is no setting."""
    involved: tuple[str, ...] = ()
    """The other settings that contradict it, if any."""
    file: Path | None = None
    line: int | None = None

    def error(self) -> ConfigError:
        """Return the error to raise for it."""
        return ConfigError(self.message, self.hint)


class InvalidConfigError(ConfigError):
    """All mistakes in a configuration; the error's own message is that of the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems[0].message, self.problems[0].hint)
