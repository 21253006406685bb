"""The parts of a holder's text, `alice (train)`: who it is, and the name of what it does."""

from __future__ import annotations

import re

LABELLED = re.compile(r"(?P<user>.*) \((?P<label>.*)\)")
"""The text of a holder whose lease has a name."""


def user_of(holder: str) -> str:
    """Return who a holder is, without the name of what it does: `alice` of `alice (train)`."""
    match = LABELLED.fullmatch(holder)
    return match["user"] if match else holder
