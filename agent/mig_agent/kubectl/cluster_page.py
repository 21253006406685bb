"""The pages of `kubectl mig`: the map of every node, what fits now on all together, leases, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mig_agent.client import to_json
from mig_agent.client.slice_maps import slice_maps
from mig_agent.client.to_json import Json
from mig_agent.client.types import Available, Status
from mig_agent.core.quantities import counted
from mig_agent.core.slicemap import render_lines
from mig_agent.kubectl.answers import NodeAnswer
from mig_agent.migctl.failures import one_line
from mig_agent.migctl.printing import table
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


def status_page(answers: Sequence[NodeAnswer], page: Page) -> str:
    """Return the map of all nodes; with `page.leases` also their leases and who waits."""
    nodes = _nodes(answers)
    widest = max((len(each.name) for node in nodes for each in slice_maps(node)), default=0)
    parts = [[_summary(answers)]]
    parts += [_node(each, page, widest) for each in answers]
    largest_share = max((each.largest_share_mib for each in nodes), default=0)
    parts.append([*map_legend(nodes, page), *fits_lines(available(nodes), largest_share, page)])
    if page.leases:
        parts += [text.splitlines() for text in (leases_page(answers, page), queue_page(answers, page))]
    return "\n\n".join("\n".join(part) for part in parts if part)


def leases_page(answers: Sequence[NodeAnswer], page: Page) -> str:
    """Return a table of the leases of all nodes."""
    found = _table(answers, lambda node: lease_rows(node.leases), page, LEASE_COLUMNS, {"HOLDER"})
    return found or f"no leases{_where(answers)}"


def queue_page(answers: Sequence[NodeAnswer], page: Page) -> str:
    """Return a table of the requests that wait on any node."""
    found = _table(answers, lambda node: queue_rows(node.queue), page, QUEUE_COLUMNS, CUT_IN_QUEUE)
    return found or f"no request waits{_where(answers)}"


def troubles(answers: Sequence[NodeAnswer]) -> list[str]:
    """Return a line for each node that gave no answer."""
    return [one_line(f"{_name(each)}: {each.trouble}") for each in answers if each.status is None]


def encode(answers: Sequence[NodeAnswer]) -> Json:
    """Encode what is known of each node, and what fits on all together."""
    return {
        "nodes": [
            {
                "node": each.pod.node,
                "pod": each.pod.name,
                "status": None if each.status is None else to_json.encode(each.status),
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


def _where(answers: Sequence[NodeAnswer]) -> str:
    """Return where something was looked for; empty if everywhere."""
    return " on nodes that answer" if any(each.status is None for each in answers) else ""


def _nodes(answers: Sequence[NodeAnswer]) -> list[Status]:
    return [each.status for each in answers if each.status is not None]


def _name(answer: NodeAnswer) -> str:
    return answer.pod.node or answer.pod.name


def _summary(answers: Sequence[NodeAnswer]) -> str:
    nodes = _nodes(answers)
    waiting, silent = sum(len(each.queue) for each in nodes), len(answers) - len(nodes)
    words = [
        counted(len(answers), "node"),
        counted(sum(len(each.gpus) for each in nodes), "GPU"),
        counted(sum(len(each.leases) for each in nodes), "lease"),
        *([f"{waiting} waiting"] if waiting else []),
        *([f"no answer from {counted(silent, 'node')}"] if silent else []),
    ]
    return ", ".join(words)


def _node(answer: NodeAnswer, page: Page, widest: int) -> list[str]:
    """Return the part of one node; the maps of all begin in the same column, after `widest` characters."""
    node = answer.status
    if node is None:
        return [one_line(f"{_name(answer)}: {answer.trouble}")]
    # The name that the cluster knows, should the agent have another.
    named = replace(node, node=answer.pod.node or node.node)
    gpus = [replace(each, name=each.name.ljust(widest)) for each in slice_maps(node)]
    lines = render_lines(gpus, page.width, color=page.color, unicode=page.unicode) if gpus else []
    return [*head(named), *lines, *map_notes(node)]


def _table(
    answers: Sequence[NodeAnswer],
    rows_of: Callable[[Status], list[tuple[str, ...]]],
    page: Page,
    columns: Sequence[str],
    cut: Collection[str],
) -> str:
    """Return the rows of all nodes in one table, the node first; empty if there are none.

    Nodes may differ in their columns: one that only some of them need is there for all. Those in `cut` are shortened
    where the page is too narrow.
    """
    tables = [(_name(each), *_split(rows_of(each.status))) for each in answers if each.status is not None]
    tables = [each for each in tables if each[2]]
    if not tables:
        return ""
    needed = {column for _, own, _ in tables for column in own}
    header = ("NODE", *(column for column in columns if column in needed))
    rows = [
        (name, *(dict(zip(own, row, strict=True)).get(column, "") for column in header[1:]))
        for name, own, found in tables
        for row in found
    ]
    bends = tuple(number for number, column in enumerate(header) if column in cut)
    return table(header, rows, width=page.width if page.cut else None, bends=bends)


def _split(rows: list[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return rows[0], rows[1:]
