"""The examples in documents, to be run.

A block marked `console` holds commands (`$ ...`) and what they print; one marked `cluster` the same for a cluster with
the agent on it. `...` in the output stands for any text in a line, and a line of nothing else for any lines. A command
has to end with 0, or with what `exit=N` behind the mark says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    """A command and what it prints."""

    command: str
    output: str
    code: int


def blocks(page: Path, language: str) -> Iterator[tuple[str, list[str]]]:
    """The bodies of this language, each with the settings behind its mark."""
    for block in BLOCK.finditer(page.read_text()):
        found, *settings = block["info"].split() or [""]
        if found == language:
            yield block["body"], settings


def examples_of(page: Path, language: str = "console") -> list[Example]:
    found = []
    for body, settings in blocks(page, language):
        code = next((int(each.removeprefix("exit=")) for each in settings if each.startswith("exit=")), 0)
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            # A command goes on after a backslash at the end of its line.
            command, output = re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr] # it matches anything
            found.append(Example(command, output, code))
    return found


def pattern_of(output: str) -> re.Pattern[str]:
    lines = []
    for line in output.splitlines():
        if line.strip() == "...":
            lines.append(r"(?:[^\n]*\n)*")
        else:
            lines.append(r"[^\n]*".join(re.escape(part) for part in line.rstrip().split("...")) + r"[ ]*\n")
    return re.compile("".join(lines))


def with_examples(language: str) -> list[Path]:
    return [page for page in PAGES if f"```{language}" in page.read_text()]
