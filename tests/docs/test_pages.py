"""No page is out of reach of the README, and the API's page is complete."""

from __future__ import annotations

import re
from pathlib import Path

from mig_agent.adapters.grpc_errors import STATUS

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)")


def test_every_page_can_be_found() -> None:
    reached: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            targets = [(page.parent / target).resolve() for target in LINK.findall(page.read_text())]
            todo += [target for target in targets if target.suffix == ".md" and target.is_file()]
            if any(target.parent.name == "decisions" for target in targets):
                # One decision leads to its folder, whose files are numbered.
                todo += (ROOT / "docs/decisions").glob("*.md")
    lost = {page for page in (ROOT / "docs").rglob("*.md") if page not in reached}
    assert not lost


def test_the_api_page_lists_every_reason_under_its_status() -> None:
    page = (ROOT / "docs/api.md").read_text()
    for reason, status in STATUS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{status.name}`"))
        assert f"`{reason}`" in row
