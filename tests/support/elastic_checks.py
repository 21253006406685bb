"""Runs the checks of a framework in a process that has it: each function `check_...`, with a folder of its own."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path


def run(functions: Mapping[str, object], folder: Path) -> None:
    """Write a line of JSON for each check, with the traceback of one that failed."""
    for name, check in functions.items():
        if not name.startswith("check_") or not callable(check):
            continue
        own = folder / name
        own.mkdir()
        try:
            check(own)
            failed = ""
        except Exception:  # noqa: BLE001 -- told
            failed = traceback.format_exc()
        sys.stdout.write(json.dumps({"check": name, "failed": failed}) + "\n")
        sys.stdout.flush()
