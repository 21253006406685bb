"""`migctl advise`: says what to ask for instead, from what earlier leases used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from mig_agent.core.quantities import counted
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, moment, verb
from mig_agent.migctl.printing import print_json, print_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mig_agent.client.types import Advice

MOST_NAMES = 10
"""The most names that an agent gives advice on in one call."""


@verb(short_help="Say what your leases used, and what less would have meant.")
@click.option("--name", metavar="NAME", default="", help="Only leases of this name, as --name gave it. Default: all.")
@click.option("--since", metavar="TIME", default="30d", show_default=True, help="How far back: 7d, 2026-01-31.")
def advise(common: Common, *, name: str, since: str) -> int:
    """Say what your leases asked for and used, and what asking for less would have meant.

    The claim is from a replay of this node's history, by the planner and the queue that serve it: each lease lasts as
    long as it did. Peaks are samples, and a fifth is added to them. With sudo it is about everybody's leases.
    """
    output = common.wants()
    first = moment(since, time.time())
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        found = client.advise(name, since=first)
    if output == "json":
        print_json({"advice": [to_json.encode(each) for each in found]})
    else:
        print_whole(render(found, name))
    return failures.DONE


def render(found: Sequence[Advice], name: str) -> str:
    """Return the advice as sentences, and what they rest on."""
    if not found:
        return f"no leases of yours named {failures.one_line(name)}" if name else "no leases of yours"
    replayed = max(each.replayed for each in found)
    lines = [failures.one_line(each.message) for each in found]
    if len(found) >= MOST_NAMES:
        words = f"The {MOST_NAMES} names that leased the most; `migctl advise --name NAME` is about another one."
        lines.append(words)
    if replayed:
        lines.append(f"From a replay of {counted(replayed, 'lease')} on this node, each as long as it was.")
    return "\n".join(lines)
