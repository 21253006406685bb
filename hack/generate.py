"""Writes the documents that are generated, or with `--check` reports which of them are out of date."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import command_reference
from chart_schema import values_schema
from mig_agent.config import docgen
from picture import slice_map

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS: Mapping[str, Callable[[], str]] = {
    "docs/mig-agent.example.yaml": docgen.example_file,
    "docs/configuration.md": docgen.page,
    "docs/reference/migctl.md": command_reference.page,
    "docs/slicemap.svg": slice_map,
    "deploy/chart/mig-agent/values.schema.json": values_schema,
}


def main() -> int:
    """Write the documents; with `--check` return 1 if one is out of date."""
    check = "--check" in sys.argv[1:]
    stale = 0
    for name, make in DOCUMENTS.items():
        path, text = ROOT / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{name} is not fresh: run hack/docs.sh")
            stale = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return stale


if __name__ == "__main__":
    sys.exit(main())
