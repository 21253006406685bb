"""Whose the subordinate uids of this machine are (subuid(5)): a user who has thousands of them is still one user."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.users import uid_named

FILE = Path("/etc/subuid")
_FIELDS = 3
"""Owner's name or number, first uid, how many."""


@dataclass(frozen=True, slots=True, order=True)
class _Range:
    first: int
    count: int
    owner: int


class Subordinates:
    """The ranges of a file that may change. Belongs to the event loop."""

    def __init__(self, file: Path = FILE, find: Callable[[str], int | None] = uid_named) -> None:
        """`find` gives the uid of a name and may be slow: it is asked in a thread."""
        self._file = file
        self._find = find
        self._seen: tuple[int, int, int] | None = None
        self._ranges: Sequence[_Range] = ()

    def owner(self, uid: int) -> int:
        """The user to whom a uid belongs: itself, where it is in no range.

        As long as an owner has no number, the first uid of the range stands for it.
        """
        self._read_again()
        place = bisect.bisect_right(self._ranges, uid, key=lambda each: each.first) - 1
        if place >= 0 and uid < self._ranges[place].first + self._ranges[place].count:
            return self._ranges[place].owner
        return uid

    def _read_again(self) -> None:
        """Where the file has changed."""
        try:
            there = self._file.stat()
            version = (there.st_mtime_ns, there.st_size, there.st_ino)
            if version == self._seen:
                return
            text = self._file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            self._seen, self._ranges = None, ()
            return
        self._seen = version
        self._ranges = _parse(text, _number)
        # A daemonic thread: where a directory service hangs, the agent must still be able to end.
        threading.Thread(target=self._name_owners, args=(version, text), name="subordinate-uids", daemon=True).start()

    def _name_owners(self, version: tuple[int, int, int], text: str) -> None:
        found = _parse(text, self._find)
        if self._seen == version:
            self._ranges = found


def _parse(text: str, find: Callable[[str], int | None]) -> Sequence[_Range]:
    """The ranges by their first uid; lines that are none are passed over."""
    ranges = []
    for line in text.splitlines():
        fields = line.strip().split(":")
        if len(fields) != _FIELDS or not all(each.isascii() and each.isdigit() for each in fields[1:]):
            continue
        first, count = int(fields[1]), int(fields[2])
        try:
            owner = find(fields[0])
        except (OSError, OverflowError, ValueError):
            owner = None
        ranges.append(_Range(first, count, first if owner is None else owner))
    return sorted(ranges)


def _number(owner: str) -> int | None:
    return int(owner) if owner.isascii() and owner.isdigit() else None
