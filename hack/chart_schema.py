"""Generates the part of the chart's schema that follows from the table of settings: their names and types."""

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
    """Return the schema of a setting's YAML values: `off` is a boolean in YAML, and 5 a number.

    The agent itself checks texts.
    """
    if row.kind.many:
        return {"description": row.words, "type": ["array", "string"]}
    if row.kind.section is not None:
        return {"description": row.words, "type": ["object", "string"]}
    if row.kind.is_switch:
        return {"description": row.words, "type": ["boolean", "string"]}
    return {"description": row.words, "type": ["string", "number", "boolean"], "minimum": 0}
