"""The examples in documents, to be run.

A block marked `console` holds commands (`$ ...`) and what they print; one marked `cluster` the same for a cluster with
the agent on it. `...` in the output stands for any text in a line, and a line of nothing else for any lines. A command
has to end with 0, or with what `exit=N` behind the mark says. `<!-- first: PAGE#SECTION -->` has the commands of a
section of another page run before those of this one. `<!-- machine: l40s:2 -->` has the agent simulate these GPUs
instead of the demo's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_MACHINE = re.compile(r"^<!-- machine: (?P<gpus>\S+) -->$", re.MULTILINE)
_FIRST = re.compile(r"^<!-- first: (?P<page>[\w.]+)#(?P<section>[\w-]+) -->$", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    """A command and what it prints."""

    command: str
    output: str
    code: int


def machine_of(page: Path | None) -> str:
    """The GPUs that the agent of a page has; of a program that is no page's (None), those of the demo."""
    found = None if page is None else _MACHINE.search(page.read_text())
    return "a100-40gb:1,h100-80gb:2" if found is None else found["gpus"]


def anchor_of(heading: str) -> str:
    """By which links name it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def blocks(page: Path, language: str, section: str = "") -> Iterator[tuple[str, list[str]]]:
    """The bodies of this language, each with the settings behind its mark; of one section, up to the next heading."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        above = ["", *_HEADING.findall(BLOCK.sub("", text[: block.start()]))]
        if section and anchor_of(above[-1]) != section:
            continue
        found, *settings = block["info"].split() or [""]
        if found == language:
            yield block["body"], settings


def needed_first(page: Path, language: str) -> list[Example]:
    """The examples of other pages that a page goes on from."""
    found = []
    for each in _FIRST.finditer(page.read_text()):
        there = examples_of(page.parent / each["page"], language, each["section"])
        assert there, f"{page.name}: there is nothing to run in {each['page']}#{each['section']}"
        found += there
    return found


def examples_of(page: Path, language: str = "console", section: str = "") -> list[Example]:
    found = []
    for body, settings in blocks(page, language, section):
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
