"""A row of the table of settings: one setting, as everything that is made from the table sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mig_agent.config.kinds import Kind

ENVIRONMENT_PREFIX = "MIG_AGENT_"
"""`MIG_AGENT_STATE_DIR` sets `state_dir`."""
ROW = "row"
"""Under this the metadata of a field has its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting, as everything that is made from the table sees it."""

    name: str
    """As the file spells it: `state_dir`."""
    kind: Kind
    words: str
    """What it does, in a sentence or two."""
    group: str
    """The heading that it stands under."""
    example: str
    default: str
    """As one would write it; "" where `when_unset` says what a missing value means."""
    when_unset: str

    @property
    def flag(self) -> str:
        """`--state-dir`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`MIG_AGENT_STATE_DIR`."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def setting(default: object, words: str, *, kind: Kind, group: str, example: str, when_unset: str = "") -> Any:  # noqa: ANN401 -- as dataclasses.field
    """One row of the table; its name comes from the field."""
    shown = "" if when_unset else kind.write(default)
    row = {"kind": kind, "words": words, "group": group, "example": example, "default": shown, "when_unset": when_unset}
    return field(default=default, metadata={ROW: row})
