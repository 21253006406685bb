"""Driver events: changes of the MIG configuration are reconciled at once, and need not wait for the next timer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from mig_agent.adapters.nvml import ChangeListener, Driver
from mig_agent.core.errors import DriverError

WAIT_SECONDS = 1.0
"""The longest wait in the driver, in seconds; it bounds how long the thread outlives the agent."""
AGAIN_SECONDS = 10.0
"""The pause after an error of the driver, in seconds."""


class DriverEvents:
    """Waits for the driver's events on a thread of its own, and calls back on the event loop that started it."""

    def __init__(self, driver: Driver, on_change: Callable[[], None]) -> None:
        self._driver = driver
        self._on_change = on_change
        self._closed = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to listen; may be called again after `close`."""
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._closed,), name="driver-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to listen after the current wait in the driver; does not wait for that."""
        self._closed.set()

    def join(self) -> None:
        """Wait until the thread has stopped, for three waits in the driver at most. Blocking."""
        if self._thread is not None:
            self._thread.join(3 * WAIT_SECONDS)

    def _run(self, closed: threading.Event) -> None:
        missed = False
        while not closed.is_set():
            with contextlib.suppress(DriverError):  # meanwhile the reconciler's timer remains
                listener = self._driver.listen()
                if listener is None:
                    return
                try:
                    if missed:
                        self._call_back()
                    missed = True
                    self._listen(listener, closed)
                finally:
                    listener.close()
            closed.wait(AGAIN_SECONDS)

    def _listen(self, listener: ChangeListener, closed: threading.Event) -> None:
        while not closed.is_set():
            if listener.wait(WAIT_SECONDS) and not closed.is_set():
                self._call_back()

    def _call_back(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_change)
