"""The pages of several nodes: the map of each, what fits now on all together, leases, and who waits.

`kubectl mig` shows the nodes of a cluster by them, and `migctl status --all-contexts` the machines of a person's
contexts. `noun` is what stands before a name: node, or context.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

from mig_agent.client import to_json
from mig_agent.client.slice_maps import slice_maps
from mig_agent.client.to_json import Json
from mig_agent.client.types import Available, Status
from mig_agent.core.quantities import counted
from mig_agent.core.slicemap import render_lines
from mig_agent.migctl import failures
from mig_agent.migctl.answers import Answer, Found, repeated, troubles
from mig_agent.migctl.failures import one_line
from mig_agent.migctl.printing import can_unicode, print_json, print_whole, table, wants_color
from mig_agent.migctl.status_page import (
    CUT_IN_QUEUE,
    LEASE_COLUMNS,
    QUEUE_COLUMNS,
    Page,
    fits_lines,
    head,
    lease_rows,
    map_legend,
    map_notes,
    queue_rows,
)

StatusPage: TypeAlias = Callable[[Sequence[Answer[Status]], Page, str], str]
"""Makes the page of some answers."""
_WIDEST_MAP = 120


def print_page(
    answers: Sequence[Answer[Status]], page: StatusPage, noun: str, *, output: str, whole: bool = False
) -> int:
    """Print the answers as `text`, `wide` or `json`, and return the exit code: NO_AGENT where one is missing.

    A page that is not `whole` says nothing of nodes without an answer, so that they are reported on stderr.
    """
    if output == "json":
        print_json(encode(answers, noun))
    else:
        wide = output == "wide"
        layout = Page(
            width=min(shutil.get_terminal_size((80, 24)).columns, _WIDEST_MAP),
            color=wants_color(),
            unicode=can_unicode(),
            cut=sys.stdout.isatty() and not wide,
            leases=wide,
        )
        print_whole(page(answers, layout, noun))
        if not whole:
            print_troubles(answers)
    return exit_code(answers)


def print_troubles(answers: Sequence[Answer[Found]]) -> None:
    """Print a line on stderr for each node that gave no answer."""
    sys.stderr.writelines(f"{each}\n" for each in troubles(answers))


def exit_code(answers: Sequence[Answer[Found]]) -> int:
    """Return NO_AGENT where any node gave no answer, so that a script knows that the page is not whole."""
    return failures.NO_AGENT if any(each.found is None for each in answers) else failures.DONE


def status_page(answers: Sequence[Answer[Status]], page: Page, noun: str) -> str:
    """Return the map of all nodes; with `page.leases` also their leases and who waits."""
    nodes, twice = _nodes(answers), repeated(answers, agent_of)
    widest = max((len(each.name) for node in nodes for each in slice_maps(node)), default=0)
    slices = max((each.memory_slices for node in nodes for each in node.gpus), default=0)
    parts = [[_summary(answers, noun)]]
    parts += [
        [one_line(f"{each.target.label}: the same agent as {twice[each.target.label]}")]
        if each.target.label in twice
        else _node(each, page, widest, slices)
        for each in answers
    ]
    largest_share = max((each.largest_share_mib for each in nodes), default=0)
    parts.append([*map_legend(nodes, page), *fits_lines(available(nodes), largest_share, page)])
    if page.leases:
        parts.append(tables_page(answers, page, noun).splitlines())
    return "\n\n".join("\n".join(part) for part in parts if part)


def tables_page(answers: Sequence[Answer[Status]], page: Page, noun: str) -> str:
    """Return the tables of leases and of who waits."""
    return f"{leases_page(answers, page, noun)}\n\n{queue_page(answers, page, noun)}"


def leases_page(answers: Sequence[Answer[Status]], page: Page, noun: str) -> str:
    """Return a table of the leases of all nodes."""
    found = _table(answers, lambda node: lease_rows(node.leases), page, noun, columns=LEASE_COLUMNS, cut={"HOLDER"})
    return found or f"no leases{_where(answers, noun)}"


def queue_page(answers: Sequence[Answer[Status]], page: Page, noun: str) -> str:
    """Return a table of the requests that wait on any node."""
    found = _table(answers, lambda node: queue_rows(node.queue), page, noun, columns=QUEUE_COLUMNS, cut=CUT_IN_QUEUE)
    return found or f"no request waits{_where(answers, noun)}"


def encode(answers: Sequence[Answer[Status]], noun: str) -> Json:
    """Encode what is known of each node, and what fits on all together."""
    return {
        f"{noun}s": [
            {
                **each.target.keys,
                "status": None if each.found is None else to_json.encode(each.found),
                "error": each.trouble or None,
            }
            for each in answers
        ],
        "available": [to_json.encode(each) for each in available(_nodes(answers))],
    }


def available(nodes: Sequence[Status]) -> tuple[Available, ...]:
    """Return what could be leased now on all nodes together, one kind at a time, the smallest first.

    Profiles of one name may differ in memory between models; then the least is given.
    """
    sums: dict[str, Available] = {}
    for each in (each for node in nodes for each in node.available):
        so_far = sums.get(each.profile, replace(each, count=0))
        memory = min(so_far.memory_mib, each.memory_mib)
        sums[each.profile] = replace(each, memory_mib=memory, count=so_far.count + each.count)
    return tuple(sorted(sums.values(), key=lambda each: (each.memory_mib, each.profile)))


def _where(answers: Sequence[Answer[Status]], noun: str) -> str:
    """Return where something was looked for; empty if everywhere."""
    return f" on {noun}s that answer" if any(each.found is None for each in answers) else ""


def agent_of(node: Status) -> object:
    """Return what tells the agent of a node apart from all others."""
    return node.node, node.boot_id, node.started_at


def _once(answers: Sequence[Answer[Status]]) -> list[tuple[str, Status]]:
    """Return the nodes that answer, each under its first name."""
    twice = repeated(answers, agent_of)
    return [
        (each.target.label, each.found) for each in answers if each.found is not None and each.target.label not in twice
    ]


def _nodes(answers: Sequence[Answer[Status]]) -> list[Status]:
    return [node for _, node in _once(answers)]


def _summary(answers: Sequence[Answer[Status]], noun: str) -> str:
    nodes = _nodes(answers)
    waiting, silent = sum(len(each.queue) for each in nodes), sum(each.found is None for each in answers)
    words = [
        counted(len(answers), noun),
        counted(sum(len(each.gpus) for each in nodes), "GPU"),
        counted(sum(len(each.leases) for each in nodes), "lease"),
        *([f"{waiting} waiting"] if waiting else []),
        *([f"no answer from {counted(silent, noun)}"] if silent else []),
    ]
    return ", ".join(words)


def _node(answer: Answer[Status], page: Page, widest: int, slices: int) -> list[str]:
    """Return the part of one node; the maps of all begin and end in the same columns."""
    node = answer.found
    if node is None:
        return troubles([answer])
    # The name by which people know it, should the agent have another.
    named = replace(node, node=answer.target.label)
    gpus = [replace(each, name=each.name.ljust(widest)) for each in slice_maps(node)]
    lines = render_lines(gpus, page.width, color=page.color, unicode=page.unicode, slices=slices) if gpus else []
    return [*head(named), *lines, *map_notes(node)]


def _table(
    answers: Sequence[Answer[Status]],
    rows_of: Callable[[Status], list[tuple[str, ...]]],
    page: Page,
    noun: str,
    *,
    columns: Sequence[str],
    cut: Collection[str],
) -> str:
    """Return the rows of all nodes in one table, its node first; empty if there are none.

    Nodes may differ in their columns: one that only some of them need is there for all. Those in `cut` are shortened
    where the page is too narrow.
    """
    tables = [(name, *_split(rows_of(node))) for name, node in _once(answers)]
    tables = [each for each in tables if each[2]]
    if not tables:
        return ""
    needed = {column for _, own, _ in tables for column in own}
    header = (noun.upper(), *(column for column in columns if column in needed))
    rows = [
        (name, *(dict(zip(own, row, strict=True)).get(column, "") for column in header[1:]))
        for name, own, found in tables
        for row in found
    ]
    bends = tuple(number for number, column in enumerate(header) if column in cut)
    return table(header, rows, width=page.width if page.cut else None, bends=bends)


def _split(rows: list[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return rows[0], rows[1:]
