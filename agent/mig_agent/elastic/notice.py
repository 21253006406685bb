"""Notices by which a process hears that it is to yield: SIGTERM or SIGUSR1, or a notice in a file."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from mig_agent.elastic.environment import NOTICE_VARIABLE
from mig_agent.elastic.words import say

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class YieldNotice:
    """Remembers that this process is to yield.

    The file is named by MIG_AGENT_NOTICE_FILE. One that is there from the beginning was for the process before this
    one: a notice is a file that appears or changes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get(NOTICE_VARIABLE, "")
        self._path = Path(path) if path else None
        self._before = self._written()
        self._by_signal = False
        self._pid = os.getpid()
        self._previous: dict[int, object] = {}

    def watch(self) -> None:
        """Catch the signals from now on; handlers that were there are called as well. Does nothing the second time.

        Until then SIGTERM ends a program as ever, so that one that never asks can be ended.
        """
        if self._previous:
            return
        if threading.current_thread() is not threading.main_thread():
            say("signals are not noticed: they can be caught in the main thread alone; call this there")
            return
        for number in _SIGNALS:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._catch)

    def stop_watching(self) -> None:
        """Restore the handlers that were there before, where nothing has replaced these since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._catch and (callable(previous) or isinstance(previous, int)):
                signal.signal(number, previous)
        self._previous = {}

    @property
    def is_given(self) -> bool:
        """True once this process is to yield."""
        written = self._written()
        if written is None:
            self._before = None  # the next one is new, whatever it is like
        return self._by_signal or written != self._before

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked process, which ends as it would have
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._by_signal = True
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _written(self) -> tuple[int, int] | None:
        """Return what tells one version of the file from another; None if there is none, or it was removed."""
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino
