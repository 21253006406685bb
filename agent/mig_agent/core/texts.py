"""Texts that one person writes and others read: which characters they may have, and how the rest is shown.

A text from one user is shown to others: in tables, logs, events, metrics and JSON. There no character may move a
cursor, change the direction of the text beside it, start a line, or be invisible.
"""

from __future__ import annotations

import re
import unicodedata

from mig_agent.core.errors import UsageError

MOST_MARKS = 4
"""Combining marks on one letter. Living languages need three; dozens cover the lines above and below."""

_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U0001d159\U000e0100-\U000e01ef]"
)
"""Letters, marks and symbols by their category that are invisible: fillers, variation selectors, blanks."""
_MARKS = frozenset({"Mn", "Me"})
_LAST_OF_FOUR_DIGITS = 0xFFFF
_LONGEST_SHOWN = 60


def visible(text: str) -> str:
    r"""Return `text` with each character that must not be shown in the form `\u202e` or `\U000e0041`.

    A backslash itself stays as it is: nothing must be hidden, but the original need not be recoverable.
    """
    if text.isascii() and text.isprintable():
        return text
    wrong = dict(_unfit(text))
    return "".join(_escape(each) if at in wrong else each for at, each in enumerate(text)) if wrong else text


def check_text(text: str, what: str, *, repeat: bool = True) -> None:
    """Raise UsageError if `text` has a character that must not be shown. `what` completes "cannot take it as ...".

    `repeat`: the message repeats the text, escaped. Pass False for a text that may be a secret.
    """
    if text.isascii() and text.isprintable():
        return
    for at, why in _unfit(text):
        shown = visible(text) if repeat else "this text"
        shown = shown if len(shown) <= _LONGEST_SHOWN else shown[: _LONGEST_SHOWN - 3] + "..."
        raise UsageError(
            f"cannot take {shown} as {what}: {why}, at position {at + 1}",
            "write it in letters, digits, signs and plain spaces; control, bidirectional and invisible characters are "
            "not taken",
        )


def _unfit(text: str) -> list[tuple[int, str]]:
    """Return the positions, from 0, of all characters that must not be shown, each with what is wrong there."""
    found = []
    marks = 0
    for at, each in enumerate(text):
        # Categories Cc, Cf, Cs, Co, Cn, Zl, Zp, and Zs except for the space.
        if not each.isprintable() or _UNSEEN.match(each):
            found.append((at, f"it has the character U+{ord(each):04X}"))
            marks = 0
        elif not each.isascii() and unicodedata.category(each) in _MARKS:
            marks += 1
            if marks > MOST_MARKS:
                found.append((at, f"it has more than {MOST_MARKS} combining marks on one letter"))
        else:
            marks = 0
    return found


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number <= _LAST_OF_FOUR_DIGITS else f"\\U{number:08x}"


def state_and_reason(state: str, reason: str) -> str:
    """Return the state of a GPU and why, to follow "is": `cordoned by root: the fan is loud`, `lost: Xid 79`."""
    if reason.startswith("drained "):
        return f"being {reason}"
    if reason.startswith(f"{state} "):
        return reason
    return f"{state}: {reason}" if reason else state
