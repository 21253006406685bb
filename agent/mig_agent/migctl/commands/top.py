"""`migctl top`: shows what is used on each instance and by which processes, live."""

from __future__ import annotations

import functools
import pwd
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from mig_agent.core.quantities import format_duration, parse_duration
from mig_agent.migctl import failures, top_view
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import print_json, print_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.text import Text

    from mig_agent.client import Client, ClientError

_REDRAW_SECONDS = 1.0
"""Longest time between two drawings of the screen."""
_OVERDUE_SECONDS = 3.0
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


@verb()
@click.option("--once", is_flag=True, help="Print it once. Also when stdout is no terminal.")
@click.option("--interval", metavar="TIME", default="2s", show_default=True, help="Between two readings.")
@click.option(
    "--sort", type=click.Choice(top_view.ORDERS), default="gpu", show_default=True, help="The order of the rows."
)
@click.option("--filter", "words", metavar="TEXT", default="", help="Only instances that have this text in their row.")
def top(common: Common, *, once: bool, interval: str, sort: str, words: str) -> int:
    """Show memory, compute and processes of each instance, live. What the driver does not tell is shown as `?`.

    COMPUTE is how many of its multiprocessors (SMs) were busy since the last reading, on Hopper and later; of a whole
    GPU, how much of the time a kernel ran.

    Keys: q quits, arrows and Page Up and Down scroll, s sorts, / filters, p shows or hides processes.
    """
    output = common.wants()
    seconds = parse_duration(interval)
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    view = top_view.View(order=sort, words=words)
    with common.client() as client:
        if output == "json":
            print_json(to_json.top(client.status(), client.usage()))
        elif once or not sys.stdout.isatty():
            print_whole(render(_read(client), view))
        else:
            _live(client, view, seconds)
    return failures.DONE


def render(reading: top_view.NodeReading, view: top_view.View) -> str:
    """Return the list as plain text, as wide as it needs to be."""
    header, lines = top_view.list_lines(reading, view, None)
    head = top_view.head(reading)
    return f"{head}\n\n{top_view.plain([header, *lines])}" if lines else f"{head}\n\n{top_view.nothing(view)}"


def _read(client: Client) -> top_view.NodeReading:
    # The agent's users are this machine's where it is on this machine.
    name = _user_name if str(client.address).startswith("unix:") else _uid
    return top_view.NodeReading(client.status(), client.usage(), name)


def _uid(uid: int) -> str:
    return f"uid {uid}"


@functools.cache
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return _uid(uid)


def _live(client: Client, view: top_view.View, seconds: float) -> None:
    """Show the page until `q` or Ctrl-C. Importing rich takes 60 ms, so it is imported only here."""
    from rich.live import Live  # noqa: PLC0415 -- see above

    from mig_agent.migctl.keys import Keyboard  # noqa: PLC0415 -- for a terminal alone

    readings = _Readings(client, seconds)
    with Live(screen=True, auto_refresh=False) as live, Keyboard(live.stop, live.start) as keyboard:
        readings.begin(keyboard.wake)
        while True:
            if readings.error is not None:
                raise readings.error
            reading, trouble = readings.latest, readings.trouble
            width, height = shutil.get_terminal_size((80, 24))
            live.update(_colored(top_view.page(reading, view, width, height, trouble)), refresh=True)
            try:
                keys = keyboard.wait(_REDRAW_SECONDS)
            except KeyboardInterrupt:
                return
            for key in keys or ():
                _, lines = top_view.list_lines(reading, view, width)
                after = view.after(key, top_view.page_size(height), len(lines))
                if after is None:
                    return
                view = after


class _Readings:
    """Reads the node again and again in a thread, so that keys work while the agent takes long or is away."""

    def __init__(self, client: Client, seconds: float) -> None:
        """Read it once. Raises ClientError."""
        self._client = client
        self._seconds = seconds
        self.latest = _read(client)
        self._at = time.monotonic()
        self._is_failing = False
        self.error: ClientError | None = None
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
        return f"the agent does not answer: these figures are {format_duration(age)} old"

    def _run(self, on_change: Callable[[], None]) -> None:
        from mig_agent.client import ClientError  # noqa: PLC0415 -- imported by then

        while self.error is None:
            time.sleep(self._seconds)
            try:
                self.latest = _read(self._client)
                self._at, self._is_failing = time.monotonic(), False
            except ClientError as error:
                if error.retryable:
                    self._is_failing = True
                else:
                    self.error = error
            on_change()


def _colored(lines: Sequence[top_view.Line]) -> Text:
    from rich.text import Text  # noqa: PLC0415 -- see `_live`

    whole = Text(no_wrap=True, overflow="crop")
    for line in lines:
        for text, style in line:
            whole.append(text, _STYLES.get(style, ""))
        whole.append("\n")
    return whole
