"""`top` of several nodes: one list of the instances of all, once or live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mig_agent.migctl import failures
from mig_agent.migctl.answers import Answer, repeated, troubles
from mig_agent.migctl.printing import print_json, print_whole
from mig_agent.migctl.top_live import render, show_live
from mig_agent.migctl.top_view import NodeReading, NodesReading, View

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.to_json import Json

_LIVE_SECONDS = 3.0
"""Time limit of an answer in a live view, where its readings come faster than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopAnswer:
    """The instances that a node's agent told of."""

    json: Json
    """The object that `migctl top -o json` prints."""
    reading: NodeReading
    agent: object
    """The id that tells the agent apart from all others."""


def ask_client(client: Client) -> TopAnswer:
    """Ask an agent for what is used on its instances. Raises MigAgentError."""
    from mig_agent.client import to_json  # noqa: PLC0415 -- imported by then
    from mig_agent.migctl.nodes_page import agent_of  # noqa: PLC0415 -- the same

    node, usage = client.status(), client.usage()
    return TopAnswer(json=to_json.top(node, usage), reading=NodeReading(node, usage, str), agent=agent_of(node))


def of_json(value: Json, agent: object) -> TopAnswer:
    """Return the answer that `migctl top -o json` has printed. Raises ValueError."""
    from mig_agent.client import from_json  # noqa: PLC0415 -- as above

    return TopAnswer(json=value, reading=NodeReading(*from_json.top(value), str), agent=agent)


def show(
    ask: Callable[[float], Sequence[Answer[TopAnswer]]],
    noun: str,
    view: View,
    *,
    output: str,
    limit: float,
    interval: float | None,
) -> int:
    """Print what all nodes answer as text or `json`, or show it live, read again after `interval` seconds.

    `ask` gets the time limit of each answer: `limit`, or less in a live view, whose readings wait for the slowest node.
    Returns the exit code: NO_AGENT where a node gives no answer, and DONE after a live view. Raises what `ask` raises.
    """
    if interval is not None:
        live_limit = min(limit, max(interval, _LIVE_SECONDS))
        show_live(lambda: read(ask(live_limit), noun), view, interval)
        return failures.DONE
    answers = ask(limit)
    if output == "json":
        print_json(encode(answers, noun))
    else:
        print_whole(render(read(answers, noun), view))
    return failures.NO_AGENT if any(each.found is None for each in answers) else failures.DONE


def read(answers: Sequence[Answer[TopAnswer]], noun: str) -> NodesReading:
    """Return the answers as one reading; an agent that has several names counts once."""
    twice = repeated(answers, lambda each: each.agent)
    found = {
        each.target.label: each.found.reading
        for each in answers
        if each.found is not None and each.target.label not in twice
    }
    return NodesReading(noun=noun, nodes=found, troubles=tuple(troubles(answers)))


def encode(answers: Sequence[Answer[TopAnswer]], noun: str) -> Json:
    """Encode the instances of each node with what is used on them."""
    return {
        f"{noun}s": [
            {
                **each.target.keys,
                "top": None if each.found is None else each.found.json,
                "error": each.trouble or None,
            }
            for each in answers
        ]
    }
