"""`migctl top`: shows what is used on each instance and by which processes, live."""

from __future__ import annotations

import functools
import pwd
import sys
from typing import TYPE_CHECKING

import click

from mig_agent.core.quantities import parse_duration
from mig_agent.migctl import failures, nodes_top, top_view
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import print_json, print_whole
from mig_agent.migctl.several import ANSWER_SECONDS, NOUN, all_contexts_option, ask, targets
from mig_agent.migctl.top_live import render, show_live

if TYPE_CHECKING:
    from mig_agent.client import Client


@verb()
@click.option("--once", is_flag=True, help="Print it once. Also when stdout is no terminal.")
@click.option("--interval", metavar="TIME", default="2s", show_default=True, help="Between two readings.")
@click.option(
    "--sort", type=click.Choice(top_view.ORDERS), default="gpu", show_default=True, help="The order of the rows."
)
@click.option("--filter", "words", metavar="TEXT", default="", help="Only instances that have this text in their row.")
@all_contexts_option
def top(common: Common, *, once: bool, interval: str, sort: str, words: str, all_contexts: bool) -> int:
    """Show memory, compute and processes of each instance, live. What the driver does not tell is shown as `?`.

    COMPUTE is how many of its multiprocessors (SMs) were busy since the last reading, on Hopper and later; of a whole
    GPU, how much of the time a kernel ran.

    Keys: q quits, arrows and Page Up and Down scroll, s sorts, / filters, p shows or hides processes.
    """
    output = common.wants()
    seconds = parse_duration(interval)
    view = top_view.View(order=sort, words=words)
    live = not once and output != "json" and sys.stdout.isatty()
    several = targets(common, all_contexts=all_contexts)
    if several:
        return nodes_top.show(
            lambda limit: ask(several, nodes_top.ask_client, limit),
            NOUN,
            view,
            output=output,
            limit=ANSWER_SECONDS,
            interval=seconds if live else None,
        )
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        if output == "json":
            print_json(to_json.top(client.status(), client.usage()))
        elif live:
            show_live(lambda: _read(client), view, seconds)
        else:
            print_whole(render(_read(client), view))
    return failures.DONE


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
