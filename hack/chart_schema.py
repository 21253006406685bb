"""Generates the part of the chart's schema that follows from the table of settings: their names, types and bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mig_agent.config.field_types import Row
from mig_agent.config.settings import ROWS

SCHEMA = Path(__file__).resolve().parent.parent / "deploy/chart/mig-agent/values.schema.json"
_WORDS = "Any setting of docs/configuration.md by its name there; wins over the other values."


def values_schema() -> str:
    """Return the whole schema file, with the current settings."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["settings"] = {
        "description": _WORDS,
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _property(row) for name, row in ROWS.items()},
    }
    return f"{json.dumps(schema, indent=2)}\n"


def _property(row: Row) -> dict[str, Any]:
    """Return the schema of a setting's YAML values; the agent itself checks what a schema cannot tell of texts."""
    kind, words = row.kind, f"{row.words} {row.bounds.capitalize()}." if row.bounds else row.words
    if kind.many:
        texts = {"type": ["string", "number"], "maxLength": kind.longest}
        return {"description": words, "type": ["array", "string", "number"], "items": texts}
    if kind.section is not None:
        return {"description": words, "type": ["object", "string"], "maxLength": kind.longest}
    if kind.is_switch:
        texts = {"maxLength": kind.longest}
        return {"description": words, "type": ["boolean", "string", "integer"], "minimum": 0, "maximum": 1, **texts}
    if kind.choices:
        return {"description": words, "type": "string", "enum": list(kind.choices)}
    found: dict[str, Any] = {"description": words, "type": list(kind.yaml_types), "maxLength": kind.longest}
    if {"integer", "number"} & set(kind.yaml_types):
        least, most = (0, 0) if kind.is_off_for_zero else (row.at_least or 0, row.at_most)
        found["minimum"] = least
        if most is not None:
            found["maximum"] = most
    if kind.pattern:
        found["pattern"] = kind.pattern
    return found
