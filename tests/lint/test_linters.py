"""The linters, as tests, so that nobody has to remember them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("agent", "tests", "hack", "examples")
GENERATED = "agent/mig_agent/pb/"

pytestmark = pytest.mark.timeout(900)


def run(*command: str) -> None:
    """Fails with the linter's own words."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def tool(name: str) -> str:
    """A program of the environment that the tests run in."""
    return str(Path(sys.executable).parent / name)


def files(*suffixes: str) -> Iterator[Path]:
    """What is in the checkout and was not made by a program."""
    folders = (*CODE, ".ci", "deploy", "docs", "profiles", "proto")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in [*ROOT.glob("*"), *found]:
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and (not suffixes or path.suffix in suffixes) and GENERATED not in name:
            yield path


def test_ruff_check() -> None:
    run(tool("ruff"), "check", *CODE)


def test_ruff_format() -> None:
    run(tool("ruff"), "format", "--check", *CODE)


def test_mypy_strict() -> None:
    run(tool("mypy"))


def test_layers() -> None:
    run(tool("lint-imports"))


def test_generated_documents_are_fresh() -> None:
    run(sys.executable, "hack/generate.py", "--check")


def test_a_whole_snapshot_is_worked_out_for_a_status_and_the_web_page_alone() -> None:
    """It walks through the queue and all leases: whoever wants the view or the reasons of a pause asks for those."""
    asking = re.compile(r"manager\.snapshot\b")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files(".py")
        if path.is_relative_to(ROOT / "agent")
        for line in path.read_text().splitlines()
        if asking.search(line)
    ]
    status = "return encode.status(self._manager.snapshot, __version__, self._caller(context))"
    assert sorted(found) == [
        "agent/mig_agent/daemon/web/feed.py: snapshot = self._manager.snapshot",
        f"agent/mig_agent/frontends/grpc/servicer.py: {status}",
    ]


def test_pauses_that_grow_are_worked_out_in_one_place() -> None:
    by_hand = re.compile(r"\b2(\.0)?\s*\*\*\s*[a-z(]|pause \*=? ?2")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files(".py")
        if path.is_relative_to(ROOT / "agent")
        for line in path.read_text().splitlines()
        if by_hand.search(line)
    ]
    assert found == [
        "agent/mig_agent/core/backoff.py: return min(self.first * 2.0**doublings, self.longest) * (0.5 + 0.5 * chance)"
    ]


def test_nothing_is_left_undone() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    # This file has to name them.
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files(".py", ".sh", ".md", ".yaml", ".proto")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_no_path_of_one_machine_is_in_the_project() -> None:
    someones = re.compile(r"(?<![\w.$}])/(home|work|Users)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files(".py", ".sh", ".md", ".yaml", ".toml", ".proto", "")
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if someones.search(line)
    ]
    assert not found


def test_every_silenced_rule_has_its_reason_beside_it() -> None:
    bare = re.compile(r"#\s*(noqa(: [A-Z0-9, ]+)?|type: ignore(\[[a-z, -]+\])?)\s*$")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files(".py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    "script", [*sorted((ROOT / "hack").glob("*.sh")), ROOT / ".ci/run"], ids=lambda path: path.name
)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    run("bash", "-n", str(script))
