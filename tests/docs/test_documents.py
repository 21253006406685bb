"""What the documents show is what happens: every example in them is run, and every link in them leads somewhere.

A block marked `console` holds commands (`$ ...`) and what they print. `...` in it stands for any text in a line, and a
line of nothing else for any lines. A command has to end with 0, or with what `console exit=N` says.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.agent import Agent

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Example:
    """A command and what it prints."""

    command: str
    output: str
    code: int


def examples_of(page: Path) -> list[Example]:
    found = []
    for block in _BLOCK.finditer(page.read_text()):
        language, *settings = block["info"].split() or [""]
        if language != "console":
            continue
        code = next((int(each.removeprefix("exit=")) for each in settings if each.startswith("exit=")), 0)
        for part in re.split(r"^\$ ", block["body"], flags=re.MULTILINE)[1:]:
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


@pytest.mark.parametrize("page", with_examples("console"), ids=lambda page: page.name)
def test_commands_do_what_the_page_shows(page: Path, agent: Agent, person: dict[str, str]) -> None:
    for example in examples_of(page):
        done = subprocess.run(
            ["bash", "-c", example.command],
            cwd=agent.folder,
            env=person,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == example.code, f"$ {example.command}\n{done.stdout}"
        assert pattern_of(example.output).fullmatch(done.stdout), f"$ {example.command}\n{done.stdout}"


@pytest.mark.parametrize("page", with_examples("python"), ids=lambda page: page.name)
def test_programs_run(page: Path, agent: Agent, person: dict[str, str]) -> None:
    for block in _BLOCK.finditer(page.read_text()):
        if block["info"].strip() != "python" or "tmp_path" in block["body"]:
            continue  # a piece of a test, which tests/simulator has whole
        done = subprocess.run(
            [sys.executable, "-c", block["body"]],
            cwd=agent.folder,
            env=person,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{block['body']}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text())
    for link in _LINK.finditer(text):
        target, _, anchor = link["target"].partition("#")
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.name} links to {link['target']}"
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {link['target']}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    names = re.findall(r"`((?:hack|docs|examples|deploy|tests|profiles|proto|agent)/[\w./-]+)`", page.read_text())
    names += re.findall(r"^((?:hack|examples)/[\w./-]+\.(?:sh|py))", page.read_text(), re.MULTILINE)
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing
