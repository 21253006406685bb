"""Reports which tests ran, from the report that pytest wrote: one line for each folder of tests."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

_OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def main(report: Path) -> int:
    """Print the report; return 1 if there is none, or no test ran."""
    if not report.exists():
        print("no tests ran")
        return 1
    counts: dict[str, Counter[str]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 -- pytest wrote it a moment ago
        # `tests.core.test_model` or, for a class, `tests.core.test_model.TestIt`.
        folder = "/".join(case.get("classname", "").split(".")[:2])
        outcome = next((_OUTCOMES[child.tag] for child in case if child.tag in _OUTCOMES), "passed")
        counts.setdefault(folder, Counter())[outcome] += 1
    for folder, outcomes in sorted(counts.items()):
        words = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        print(f"ran {folder}: {words}")
    total = sum((outcomes for outcomes in counts.values()), Counter[str]())
    print(f"ran all: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 0 if total else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
