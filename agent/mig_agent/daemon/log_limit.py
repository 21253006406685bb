"""Limits how often libraries may log: messages that a caller can provoke in gRPC must not fill a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_SECONDS = 60.0
LEFT_OUT = "left_out"
"""Attribute of a record: the number of similar records left out before it."""


class OncePerMinute(logging.Filter):
    """Passes one record a minute from each line of a library's code."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._passed: dict[tuple[str, int], float] = {}
        """Time of the last passed record by logger and line; bounded by the libraries' lines that log."""
        self._left_out: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record may pass."""
        place = (record.name, record.lineno)
        now = self._now()
        passed = self._passed.get(place)
        if passed is not None and now < passed + _SECONDS:
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return False
        self._passed[place] = now
        setattr(record, LEFT_OUT, self._left_out.pop(place, 0))
        return True
