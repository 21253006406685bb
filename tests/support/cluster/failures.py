"""What can go wrong with a cluster, in words for people."""

from __future__ import annotations

from pathlib import Path

_TAIL_LINES = 25


class ClusterError(Exception):
    """The cluster could not do it; the message starts with "cannot"."""


def tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """The end of a log, for the message of an error; says so when there is none."""
    try:
        text = log.read_text(errors="replace").rstrip()
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    return f"the end of {log}:\n" + "\n".join(text.splitlines()[-lines:])
