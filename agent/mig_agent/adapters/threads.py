"""A thread that makes calls one after the other. Daemonic: one that hangs does not keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Answer = TypeVar("_Answer")


class Call(Generic[_Answer]):
    """A call on its way; `answer` belongs to the event loop. `on_return` is called there when it has come back."""

    __slots__ = ("_error", "_function", "_loop", "_on_return", "_value", "answer", "begun")

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
        self.begun = False
        self.answer: asyncio.Future[_Answer] = loop.create_future()

    def run(self) -> None:
        """Makes the call, in the thread; not when nobody waits for it any more."""
        if not self.answer.done():
            self.begun = True
            try:
                self._value = self._function()
            except BaseException as error:  # noqa: BLE001 -- whatever it is, it goes to whoever waits
                self._error = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
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
    """Runs calls in order. Starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Call[_Answer]) -> None:
        """Has the call made after those submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(call)

    def run(self, function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
        """Has a function called; its answer, on the running event loop."""
        call = Call(function, asyncio.get_running_loop())
        self.submit(call)
        return call.answer

    def close(self) -> None:
        """Ends the thread after the calls submitted so far; does not wait."""
        if self._thread is not None:
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # a thread that waits must not keep the last answer alive
