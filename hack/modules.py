"""Reports modules that may be too long, or too small to stand alone. It fails nothing: a reader decides."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

LONG = 600
"""In lines."""
SOURCE = Path(__file__).resolve().parent.parent / "agent"
_GENERATED = "mig_agent.pb"


def main(source: Path = SOURCE) -> int:
    """Print the report; the exit code is always 0."""
    texts = {name: path.read_text() for path, name in _modules(source) if not name.startswith(_GENERATED)}
    long = {name: lines for name, text in texts.items() if (lines := len(text.splitlines())) > LONG}
    print(f"modules above {LONG} lines: {len(long)}")
    for name, lines in sorted(long.items()):
        print(f"  {name}: {lines}")
    alone = single_importers(texts)
    print(f"modules with a single importer: {len(alone)}")
    for name, importer in sorted(alone.items()):
        print(f"  {name} <- {importer}")
    return 0


def single_importers(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the modules that exactly one other module imports, each with that one. `texts` is source by module."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        for imported in _imported(ast.parse(text), texts):
            if imported != name:
                importers[imported].add(name)
    return {name: next(iter(found)) for name, found in importers.items() if len(found) == 1}


def _imported(tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from package import module` imports the module, and anything else what is named first.
            modules = {f"{node.module}.{each.name}" for each in node.names}
            yield from (modules & set(known)) or {node.module} & set(known)


def _modules(source: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.exit(main())
