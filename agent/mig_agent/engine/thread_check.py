"""A check for tests: objects of the event loop are used on no other thread."""

from __future__ import annotations

import threading
from typing import ClassVar, Self


class LoopBound:
    """Raises AssertionError when an object is used on another thread than the one that made it.

    A base class, named before the class that it guards: `class CheckedState(LoopBound, State)`. It makes each access
    slower, so only an agent whose setting `check_threads` is on uses it.
    """

    ON_ANY_THREAD: ClassVar[frozenset[str]] = frozenset()
    """The attributes that other threads may read: they hold, or return, a value that is replaced as a whole."""

    def __new__(cls, *_args: object, **_named: object) -> Self:
        """Remember the thread that makes the object."""
        made = super().__new__(cls)
        object.__setattr__(made, "_owner", threading.get_ident())
        return made

    def __getattribute__(self, name: str) -> object:
        """Return the attribute. Raises AssertionError on another thread."""
        if not name.startswith("__") and name not in type(self).ON_ANY_THREAD:
            _refuse_elsewhere(self, name)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set the attribute. Raises AssertionError on another thread."""
        _refuse_elsewhere(self, name)
        object.__setattr__(self, name, value)


def _refuse_elsewhere(guarded: LoopBound, name: str) -> None:
    if threading.get_ident() != object.__getattribute__(guarded, "_owner"):
        here = threading.current_thread().name
        raise AssertionError(f"{type(guarded).__name__}.{name} belongs to the event loop, and is used on thread {here}")
