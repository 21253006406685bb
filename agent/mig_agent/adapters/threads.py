"""Threads that make blocking calls in order. Daemonic: a call that hangs does not keep the process from exiting."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Answer = TypeVar("_Answer")


class Call(Generic[_Answer]):
    """A blocking call in a thread; `answer` is a future of the event loop, where `on_return` is called."""

    __slots__ = ("_error", "_function", "_loop", "_on_return", "_value", "answer", "started")

    def __init__(
        self,
        function: Callable[[], _Answer],
        loop: asyncio.AbstractEventLoop,
        on_return: Callable[[Call[Any]], None] | None = None,
    ) -> None:
        self._function = function
        self._loop = loop
        self._on_return = on_return
        self._value: _Answer | None = None
        self._error: BaseException | None = None
        self.started = False
        self.answer: asyncio.Future[_Answer] = loop.create_future()

    def run(self) -> None:
        """Make the call in the thread; skip it if its caller has given up waiting."""
        if not self.answer.done():
            self.started = True
            try:
                self._value = self._function()
            except BaseException as error:  # noqa: BLE001 -- any error goes to the waiting caller
                self._error = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.answer.done():
            if self._error is not None:
                self.answer.set_exception(self._error)
            else:
                self.answer.set_result(self._value)  # type: ignore[arg-type] # None is then what the call answered
        if self._on_return is not None:
            self._on_return(self)


class CallThread:
    """Runs calls in order, in a thread that starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Call[_Answer]) -> None:
        """Queue a call after those submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(call)

    def run(self, function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
        """Queue a function call; return its future on the running event loop."""
        call = Call(function, asyncio.get_running_loop())
        self.submit(call)
        return call.answer

    def close(self) -> None:
        """End the thread after the calls submitted so far, without waiting."""
        if self._thread is not None:
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # a waiting thread must not keep the last answer alive
