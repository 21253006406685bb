"""Prints what people are to know, on standard error."""

from __future__ import annotations

import contextlib
import sys


def say(words: str) -> None:
    """Write one line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        sys.stderr.write(f"elastic: {words}\n")
        sys.stderr.flush()
