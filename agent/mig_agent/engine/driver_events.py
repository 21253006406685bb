"""Hearing of changes of the MIG configuration from the driver, so that they need not wait for the slow look."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from mig_agent.adapters.nvml import ChangeListener, Driver
from mig_agent.core.errors import DriverError

WAIT_SECONDS = 1.0
"""One wait in the driver; it bounds how long the thread outlives the agent."""
AGAIN_SECONDS = 10.0
"""After an error of the driver."""


class DriverEvents:
    """A thread that waits in the driver. Calls back on the event loop that it was started on."""

    def __init__(self, driver: Driver, on_change: Callable[[], None]) -> None:
        self._driver = driver
        self._on_change = on_change
        self._closed = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to listen; again after `close`, too."""
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._closed,), name="driver-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops at the next occasion; does not wait."""
        self._closed.set()

    def join(self) -> None:
        """Waits until it has stopped, or for a few of its waits in the driver. Blocking."""
        if self._thread is not None:
            self._thread.join(3 * WAIT_SECONDS)

    def _run(self, closed: threading.Event) -> None:
        missed = False
        while not closed.is_set():
            with contextlib.suppress(DriverError):  # meanwhile the slow look remains
                listener = self._driver.listen()
                if listener is None:
                    return
                try:
                    if missed:
                        self._tell()
                    missed = True
                    self._listen(listener, closed)
                finally:
                    listener.close()
            closed.wait(AGAIN_SECONDS)

    def _listen(self, listener: ChangeListener, closed: threading.Event) -> None:
        while not closed.is_set():
            if listener.wait(WAIT_SECONDS) and not closed.is_set():
                self._tell()

    def _tell(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_change)
