"""docs/reference/reliability.md shows what the tests of this folder go through."""

from __future__ import annotations

import pytest

from support.reliability import TABLES, shown


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_what_is_tested(name: str) -> None:
    assert shown(name) == TABLES[name](), "run tests/support/reliability.py"
