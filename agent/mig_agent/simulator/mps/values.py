"""Reading and showing of pinned memory limits as MPS does, with all that it accepts without a word."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\s*([+-]?[0-9]+)(.?)")
_MIB_OF_GIB = 1024
_ALL_MIB = 1 << 44
"""2^64 bytes, in MiB: a negative number counts down from it."""


def read_mib(text: str) -> int:
    """Return a limit in MiB; 0, which clears the limit, for what is no number.

    A `G` directly behind an integer means GiB; anything else there is ignored and the number is in MiB.
    """
    found = _NUMBER.match(text)
    if found is None:
        return 0
    return int(found[1]) * (_MIB_OF_GIB if found[2] in {"G", "g"} else 1) % _ALL_MIB


def shown(mib: int | None) -> str:
    """Return a limit as MPS shows it: whole GiB rounded down, or MiB below one GiB; empty without a limit."""
    if not mib:
        return ""
    return f"{mib}M" if mib < _MIB_OF_GIB else f"{mib // _MIB_OF_GIB}G"


def read_ordinal(text: str) -> int:
    """Return a device's ordinal as C's atoi reads it: 0 for a UUID."""
    found = _NUMBER.match(text)
    return 0 if found is None else int(found[1])
