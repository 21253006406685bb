"""Shows the node again at each change, as the agent reports it: for `migctl status --watch`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mig_agent.client import ClientError, to_json
from mig_agent.migctl.failures import one_line
from mig_agent.migctl.printing import print_whole
from mig_agent.migctl.status_page import Page, render

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.types import Status

_REDRAW_SECONDS = 1.0
"""Interval at which ages and deadlines are drawn again on a terminal; the agent is not asked for that."""
_TOGETHER_SECONDS = 0.05
"""Changes that come within this time are shown together."""
_AGAIN_SECONDS = 1.0
"""Pause before an agent that went away is called again."""
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_FROM_THE_TOP, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def watch_node(client: Client, look: Callable[[], Status], page: Callable[[], Page] | None) -> None:
    """Show the node now and after each event, until Ctrl-C. Raises Refused, and NoAgent if none answers at first.

    `look` returns the state to show, and `page` how to draw it each time; without it, it is a line of JSON.
    """
    node, trouble = look(), ""
    live = sys.stdout.isatty() and page is not None
    changed = threading.Event()
    threading.Thread(target=_follow, args=(client, changed), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt), _screen() if live else contextlib.nullcontext():
        _show(node, page and page(), trouble, live=live)
        while True:
            if changed.wait(_REDRAW_SECONDS if live else None):
                time.sleep(_TOGETHER_SECONDS)
                changed.clear()
                before = node
                try:
                    node, trouble = look(), ""
                except ClientError as error:
                    if not error.retryable:
                        raise
                    trouble = str(error)
                if not live and node == before:
                    continue
            _show(node, page and page(), trouble, live=live)


def _follow(client: Client, changed: threading.Event) -> None:
    """Set `changed` at each event, and when the agent goes away or comes back."""
    while True:
        with contextlib.suppress(ClientError):
            revision = client.status().revision
            changed.set()
            for _ in client.watch(revision):
                changed.set()
        changed.set()
        time.sleep(_AGAIN_SECONDS)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Use the terminal's other screen while the block runs, so that what was on it comes back."""
    sys.stdout.write(_OTHER_SCREEN)
    try:
        yield
    finally:
        sys.stdout.write(_FIRST_SCREEN)
        sys.stdout.flush()


def _show(node: Status, page: Page | None, trouble: str, *, live: bool) -> None:
    if page is None:
        print_whole(json.dumps(to_json.shown(to_json.encode(node)), ensure_ascii=False))
        return
    text = render(node, page)
    if not live:
        print_whole(f"{text}\n")
        return
    lines = [*([one_line(f"{trouble}; what follows is older")] if trouble else []), *text.splitlines()]
    height = shutil.get_terminal_size((80, 24)).lines
    if len(lines) > height:
        lines = [*lines[: max(1, height - 1)], "..."]
    drawn = f"{_REST_OF_LINE}\n".join(lines)
    sys.stdout.write(f"{_FROM_THE_TOP}{drawn}{_REST_OF_LINE}{_REST_OF_SCREEN}")
    sys.stdout.flush()
