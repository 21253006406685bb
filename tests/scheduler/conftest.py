"""Two nodes with unlike GPUs, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.placing import Placing, placing


@pytest.fixture(scope="module")
def nodes() -> Iterator[Placing]:
    with placing(one="a100-40gb:1", two="h100-80gb:1") as made:
        yield made
