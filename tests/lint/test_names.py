"""One class name means one thing, and names of ours that stand in texts are there."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "agent" / "mig_agent"
OTHER_WORLDS = frozenset({"client", "pb", "simulator"})
"""Callers' types mirror the agent's, the simulator's NVIDIA's, and what is generated the protocols'."""
NAME = re.compile(r"(?<![\w./])mig_agent(?:\.[A-Za-z_]\w*)+")
EXCEPTIONS = frozenset({"tests/lint/test_modules.py"})
"""A made-up package of the same name."""


def class_names(package: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        if where.parts[0] not in OTHER_WORLDS:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    yield node.name, f"{where}:{node.lineno}"


def test_no_class_name_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, where in class_names(PACKAGE):
        places[name].append(where)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def names_in_strings(folder: Path) -> Iterator[tuple[str, str]]:
    """Every dotted name of ours in a string literal, with where it is."""
    for path in sorted(folder.rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        if where in EXCEPTIONS or "/pb/" in where:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in NAME.findall(node.value):
                    yield name, f"{where}:{node.lineno}"


def is_there(name: str) -> bool:
    """Return whether a module, or an attribute below one, has this name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            annotated = attribute in getattr(found, "__annotations__", {})
            if not annotated and not hasattr(found, attribute):
                return False
            found = getattr(found, attribute, None)
        return True
    return False


def test_names_in_strings_are_there() -> None:
    """The names are of what a test replaces, and of what `python -m` runs: no other tool follows a move of these."""
    found = [each for folder in ("agent", "tests", "hack") for each in names_in_strings(ROOT / folder)]
    assert len(found) > 40
    known = {name: is_there(name) for name in {name for name, _ in found}}
    assert [f"{where}: {name}" for name, where in found if not known[name]] == []


def test_a_name_that_is_not_there_is_found() -> None:
    assert is_there("mig_agent.core.errors.Reason.NO_CAPACITY")
    assert not is_there(f"{PACKAGE.name}.core.errors.Gone")
    assert not is_there(f"{PACKAGE.name}.crashpoints")
