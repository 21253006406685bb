"""What the documents show is what happens: every example in them is run, and every link in them leads somewhere.

How examples are written is told in `support.documents`. Those for a cluster are run in tests/e2e.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.agent import PROCESS_SECONDS, Agent
from support.documents import BLOCK, PAGES, ROOT, anchor_of, examples_of, pattern_of, with_examples

_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


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
            timeout=PROCESS_SECONDS,
        )
        assert done.returncode == example.code, f"$ {example.command}\n{done.stdout}"
        assert pattern_of(example.output).fullmatch(done.stdout), f"$ {example.command}\n{done.stdout}"


@pytest.mark.parametrize("page", with_examples("python"), ids=lambda page: page.name)
def test_programs_run(page: Path, agent: Agent, person: dict[str, str]) -> None:
    for block in BLOCK.finditer(page.read_text()):
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
            timeout=PROCESS_SECONDS,
        )
        assert done.returncode == 0, f"{block['body']}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for link in _LINK.finditer(text):
        target, _, anchor = link["target"].partition("#")
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.name} links to {link['target']}"
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in set(map(anchor_of, headings)), f"{page.name} links to {link['target']}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    names = re.findall(r"`((?:hack|docs|examples|deploy|tests|profiles|proto|agent)/[\w./-]+)`", page.read_text())
    names += re.findall(r"^((?:hack|examples)/[\w./-]+\.(?:sh|py))", page.read_text(), re.MULTILINE)
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing
