"""Shows `top` live on a terminal, of one node or of several: drawn again at each reading, with keys."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mig_agent import bootstrap
from mig_agent.core.errors import MigAgentError
from mig_agent.core.quantities import format_duration
from mig_agent.migctl import top_view

if TYPE_CHECKING:
    from rich.text import Text

_REDRAW_SECONDS = 1.0
"""Longest time between two drawings of the screen."""
_OVERDUE_SECONDS = 4.0
"""Seconds after which a reading that takes that long is shown as missing."""
_STYLES = {
    "trouble": "bold red",
    "bold": "bold",
    "keys": "dim",
    "process": "dim",
    "bar": "green",
    "full": "red",
    "leased": "blue",
    "idle": "cyan",
    "blocked": "red",
    "foreign": "magenta",
    "creating": "yellow",
    "destroying": "yellow",
}


def render(reading: top_view.Reading, view: top_view.View) -> str:
    """Return the list as plain text, as wide as it needs to be."""
    header, lines = top_view.list_lines(reading, view, None)
    head = top_view.head(reading)
    return f"{head}\n\n{top_view.plain([header, *lines])}" if lines else f"{head}\n\n{top_view.nothing(view)}"


def show_live(read: Callable[[], top_view.Reading], view: top_view.View, seconds: float) -> None:
    """Show a reading each `seconds` until `q` or Ctrl-C. Raises what `read` raises at first, and later if it is final.

    Importing rich takes 60 ms, so it is imported only here.
    """
    from rich.live import Live  # noqa: PLC0415 -- see above

    from mig_agent.migctl.keys import Keyboard  # noqa: PLC0415 -- for a terminal alone

    bootstrap.raise_when_interrupted()  # from here on the terminal has to be given back
    readings = _Readings(read, seconds)
    # Ctrl-C ends it like `q`, also while the screen is being drawn.
    with (
        suppress(KeyboardInterrupt),
        Live(screen=True, auto_refresh=False) as live,
        Keyboard(live.stop, live.start) as keyboard,
    ):
        readings.begin(keyboard.wake)
        while True:
            if readings.error is not None:
                raise readings.error
            reading, trouble = readings.latest, readings.trouble
            width, height = shutil.get_terminal_size((80, 24))
            live.update(_colored(top_view.page(reading, view, width, height, trouble)), refresh=True)
            for key in keyboard.wait(_REDRAW_SECONDS) or ():
                _, lines = top_view.list_lines(reading, view, width)
                after = view.after(key, top_view.page_size(height), len(lines))
                if after is None:
                    return
                view = after


class _Readings:
    """Reads again and again in a thread, so that keys work while an agent takes long or is away."""

    def __init__(self, read: Callable[[], top_view.Reading], seconds: float) -> None:
        """Read once. Raises MigAgentError."""
        self._read = read
        self._seconds = seconds
        self.latest = read()
        self._at = time.monotonic()
        self._is_failing = False
        self.error: MigAgentError | None = None
        """Why there will be no more; None while there may be."""

    def begin(self, on_change: Callable[[], None]) -> None:
        """Start reading; `on_change` is called in the thread after each attempt."""
        threading.Thread(target=self._run, args=(on_change,), daemon=True).start()

    @property
    def trouble(self) -> str:
        """Words that say how old the latest reading is, where the agent does not answer; else empty."""
        age = time.monotonic() - self._at
        if not self._is_failing and age < self._seconds + _OVERDUE_SECONDS:
            return ""
        who = "no answer" if self.latest.noun else "the agent does not answer"
        return f"{who}: these figures are {format_duration(age)} old"

    def _run(self, on_change: Callable[[], None]) -> None:
        while self.error is None:
            time.sleep(self._seconds)
            try:
                self.latest = self._read()
                self._at, self._is_failing = time.monotonic(), False
            except MigAgentError as error:
                if getattr(error, "retryable", False):
                    self._is_failing = True
                else:
                    self.error = error
            on_change()


def _colored(lines: Sequence[top_view.Line]) -> Text:
    from rich.text import Text  # noqa: PLC0415 -- see `show_live`

    whole = Text(no_wrap=True, overflow="crop")
    for line in lines:
        for text, style in line:
            whole.append(text, _STYLES.get(style, ""))
        whole.append("\n")
    return whole
