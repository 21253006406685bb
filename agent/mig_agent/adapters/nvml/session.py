"""Sessions with the driver's library, and the calls in flight in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mig_agent.core.errors import DriverError, DriverErrorKind

_CLOSING_SECONDS = 3.0
"""Time for which `close` waits for calls in flight, such as one that waits for an event for a second."""


class Session:
    """Tracks calls in flight, so that the NVML session is not closed under them. Thread-safe; closed at first."""

    def __init__(self) -> None:
        self.is_open = False
        self._in_flight = 0
        self._changed = threading.Condition()

    def enter(self, call: str, gpu: int | None) -> None:
        """Register a call that begins. Raises DriverError of kind LIBRARY if the session is closed."""
        with self._changed:
            if not self.is_open:
                detail = "no session with the driver is open"
                raise DriverError(DriverErrorKind.LIBRARY, call, detail=detail, gpu_index=gpu)
            self._in_flight += 1

    def leave(self) -> None:
        """Unregister a call that has returned."""
        with self._changed:
            self._in_flight -= 1
            if not self._in_flight:
                self._changed.notify_all()

    @contextmanager
    def held(self, call: str, gpu: int | None) -> Iterator[None]:
        """Keep the session from being closed for as long as the context lasts; raises as `enter`."""
        self.enter(call, gpu)
        try:
            yield
        finally:
            self.leave()

    def close(self) -> bool:
        """Refuse new calls and wait for those in flight; return False if the session was closed already.

        Raises DriverError TIMEOUT if they do not return within _CLOSING_SECONDS; the session then stays open.
        """
        with self._changed:
            if not self.is_open:
                return False
            self.is_open = False
            if not self._changed.wait_for(lambda: not self._in_flight, _CLOSING_SECONDS):
                self.is_open = True
                detail = f"calls under way have not come back: {self._in_flight}"
                raise DriverError(DriverErrorKind.TIMEOUT, "nvmlShutdown", detail=detail)
        return True
