"""Shows while a request waits its position in the queue, when it is likely to start, and what blocks it."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from mig_agent.migctl.failures import LeftQueueError
from mig_agent.migctl.wait_words import wait_line

if TYPE_CHECKING:
    from mig_agent.client.types import QueuePosition


class Progress:
    """Writes to stderr: over one line on a terminal, a line for each change elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = False
        self._waited = False
        self._printed = (0, False)

    def __call__(self, position: QueuePosition) -> None:
        """Show that the request waits at this position, when it is likely to start, and what blocks it."""
        if self._live:
            columns = shutil.get_terminal_size((80, 24)).columns
            words = wait_line("migctl: waiting, ", position, " (Ctrl-C leaves it)", columns)
            print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
        elif self._printed != (printed := (int(position), position.estimate is not None)):
            # Not each time that an estimate has moved: nobody wants a log full of them.
            print(wait_line("migctl: waiting, ", position, ""), file=sys.stderr, flush=True)
            self._printed = printed
        self._shown = self._waited = True

    def interrupted(self) -> BaseException:
        """Return the exception for Ctrl-C: after a wait, one that says that the request has left the queue."""
        return LeftQueueError() if self._waited else KeyboardInterrupt()

    def clear(self) -> None:
        """Remove the line again, on a terminal."""
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._shown = False
