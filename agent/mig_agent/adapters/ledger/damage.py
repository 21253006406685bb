"""Distinguishes damage of the ledger from a disk or folder that is unusable at the moment."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

READING_ERRORS = (sqlite3.Error, ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)
"""Exceptions that reading a damaged ledger raises. UnicodeDecodeError and JSONDecodeError are ValueErrors."""

_PRIMARY = 0xFF
_OF_THE_MACHINE = frozenset(
    [
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOLFS,
        sqlite3.SQLITE_AUTH,
    ]
)
"""Primary result codes of SQLite that say nothing about the file's content."""


class DamagedError(Exception):
    """The ledger, its log or its commit counter is not as it was written; the text says which and how."""


def is_damage(error: Exception, path: Path) -> bool:
    """Return True if this error of opening or reading the ledger means that the file's content is wrong."""
    if isinstance(error, OSError):
        return False
    if not isinstance(error, sqlite3.Error):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return True  # raised by the module itself, for example for text that is not UTF-8
    if code & _PRIMARY == sqlite3.SQLITE_READONLY:
        # The machine allows writing, so the file's header forbids it.
        return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return code & _PRIMARY not in _OF_THE_MACHINE
