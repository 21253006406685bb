"""Limits how often libraries may log: what a caller can make gRPC say must not fill a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_SECONDS = 60.0
LEFT_OUT = "left_out"
"""The attribute of a record that says how many like it were left out before."""


class OncePerMinute(logging.Filter):
    """Lets one record a minute pass from each place in a library's code."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._passed: dict[tuple[str, int], float] = {}
        """When the last record of a place passed. There are as many places as libraries have lines that log."""
        self._left_out: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Decides on one record."""
        place = (record.name, record.lineno)
        now = self._now()
        passed = self._passed.get(place)
        if passed is not None and now < passed + _SECONDS:
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return False
        self._passed[place] = now
        setattr(record, LEFT_OUT, self._left_out.pop(place, 0))
        return True
