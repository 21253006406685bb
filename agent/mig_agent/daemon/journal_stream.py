"""Priorities for lines that systemd's journal reads, as sd-daemon(3) has them: `<3>` before an error.

Without them every line of standard error counts as `info`, and `journalctl -p err` shows none.
"""

from __future__ import annotations

import os

_STANDARD_ERROR = 2
_INFO = 6
_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": _INFO, "debug": 7}


def is_journal(descriptor: int = _STANDARD_ERROR) -> bool:
    """Return True if the journal reads what is written to the descriptor, by JOURNAL_STREAM of systemd.exec(5)."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        there = os.fstat(descriptor)
    except OSError:
        return False
    # A child inherits the variable, but its standard error may be a file.
    return named == f"{there.st_dev}:{there.st_ino}"


def with_priority(text: str, level: str) -> str:
    """Return the text with the priority of a level before each of its lines."""
    prefix = f"<{_PRIORITIES.get(level, _INFO)}>"
    return "\n".join(prefix + line for line in text.split("\n"))
