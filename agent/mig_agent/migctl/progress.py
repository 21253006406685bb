"""Shows how a request waits: its place in the queue, its likely start, what blocks it, and an agent that is away."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from mig_agent.migctl.failures import LeftQueueError, one_line
from mig_agent.migctl.wait_words import wait_line

if TYPE_CHECKING:
    from mig_agent.client.errors import ClientError
    from mig_agent.client.types import QueuePosition


class Progress:
    """Writes to stderr: over one line on a terminal, a line for each change elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = False
        self._waited = False
        self._printed: tuple[int, bool, bool] | None = None

    def __call__(self, position: QueuePosition) -> None:
        """Show that the request waits at this position, when it is likely to start, and what blocks it."""
        if self._live:
            columns = shutil.get_terminal_size((80, 24)).columns
            words = wait_line("migctl: waiting, ", position, " (Ctrl-C leaves it)", columns)
            print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
        elif self._printed != (printed := (int(position), position.estimate is not None, bool(position.limit))):
            # Not each time that an estimate has moved: nobody wants a log full of them.
            print(wait_line("migctl: waiting, ", position, ""), file=sys.stderr, flush=True)
            self._printed = printed
        self._shown = self._waited = True

    def away(self, error: ClientError | None) -> None:
        """Show why the agent cannot be reached while the request waits; None: that it is back."""
        self.clear()
        self._waited = True
        if error is None:
            print("migctl: the agent is back, and the request waits again", file=sys.stderr, flush=True)
        else:
            words = one_line(f"{error}; the request goes on waiting, and is sent again when the agent is back")
            print(f"migctl: {words}", file=sys.stderr, flush=True)

    def interrupted(self) -> BaseException:
        """Return the exception for Ctrl-C: after a wait, one that says that the request has left the queue."""
        return LeftQueueError() if self._waited else KeyboardInterrupt()

    def clear(self) -> None:
        """Remove the line again, on a terminal."""
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._shown = False
