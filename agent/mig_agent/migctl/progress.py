"""Shows the position in the queue while a request waits, and whether the agent is away."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mig_agent.migctl.failures import LeftQueueError, one_line

if TYPE_CHECKING:
    from mig_agent.client.errors import ClientError


class Progress:
    """Writes to stderr: over one line on a terminal, a line for each change elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = False
        self._waited = False

    def __call__(self, position: int) -> None:
        """Show that the request waits at this position, 1 being the next."""
        place = "next in the queue" if position == 1 else f"place {position} in the queue"
        words = f"migctl: waiting, {place}"
        if self._live:
            print(f"\r\x1b[K{words} (Ctrl-C leaves it)", end="", file=sys.stderr, flush=True)
        else:
            print(words, file=sys.stderr, flush=True)
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
