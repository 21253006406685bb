"""Whether the driver's library may be called, and how many calls are under way: nobody calls into what is unloaded."""

from __future__ import annotations

import threading

from mig_agent.core.errors import DriverError, DriverErrorKind

_CLOSING_SECONDS = 3.0
"""For calls under way, such as one that waits for an event for a second, to come back before a session ends."""


class Session:
    """Thread-safe. Closed at first."""

    def __init__(self) -> None:
        self.is_open = False
        self._under_way = 0
        self._changed = threading.Condition()

    def enter(self, call: str, gpu: int | None) -> None:
        """A call begins; `leave` ends it. Raises DriverError of kind LIBRARY while it is closed."""
        with self._changed:
            if not self.is_open:
                detail = "no session with the driver is open"
                raise DriverError(DriverErrorKind.LIBRARY, call, detail=detail, gpu_index=gpu)
            self._under_way += 1

    def leave(self) -> None:
        """A call has come back."""
        with self._changed:
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()

    def close(self) -> bool:
        """Lets no call begin any more and waits a while for those under way; whether it was open.

        Raises DriverError TIMEOUT where they do not come back, and then it is open as before.
        """
        with self._changed:
            if not self.is_open:
                return False
            self.is_open = False
            if not self._changed.wait_for(lambda: not self._under_way, _CLOSING_SECONDS):
                self.is_open = True
                detail = f"calls under way have not come back: {self._under_way}"
                raise DriverError(DriverErrorKind.TIMEOUT, "nvmlShutdown", detail=detail)
        return True
