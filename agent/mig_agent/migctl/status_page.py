"""The page of `migctl status`: a line for each GPU, what fits now, the leases and the queue."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mig_agent.client.slice_maps import slice_maps
from mig_agent.core.quantities import counted, format_duration, format_mib
from mig_agent.core.slicemap import (
    FREE,
    UNUSABLE,
    render_legend,
    render_lines,
    render_text,
)
from mig_agent.migctl.failures import one_line
from mig_agent.migctl.lease_names import short_ids
from mig_agent.migctl.printing import ago, gpu_state, place, table, until
from mig_agent.migctl.wait_words import OWN_LIMIT, blocked_by, start_interval

if TYPE_CHECKING:
    from mig_agent.client.types import Available, Gpu, LeaseInfo, LedgerDoubt, Status, Waiting

MOST_LINES = 16
"""The page is kept this short where it can be: leases and the end of a long queue are left out, and it says so."""
WHOLE = "whole"
"""The profile of a whole GPU."""
_LEAST_QUEUE = 3
"""Lines of the queue that are shown however long the page is: its header, the first, and how many more."""
_MOST_FITS_LINES = 2
LEASE_COLUMNS = ("LEASE", "HOLDER", "GPU", "SLICES", "PROFILE", "AGE", "ENDS IN", "NOTE")
QUEUE_COLUMNS = ("PLACE", "REQUEST", "HOLDER", "WANTS", "PRIORITY", "WAITS", "LIKELY TO START", "BLOCKED BY")
CUT_IN_QUEUE = frozenset({"HOLDER", "WANTS", "BLOCKED BY"})
_WIDEST_NOTE = 20
"""Longer notes of leases go below their rows where the table is too wide."""
_LEFT_OUT_OF_QUEUE = ("WAITS", "PRIORITY")
"""Columns that are left out before others are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The layout of the page."""

    width: int = 80
    color: bool = False
    unicode: bool = True
    cut: bool = False
    """True to cut long names so that tables fit the width, too."""
    boxes: bool = False
    """True to draw each GPU as a box of several lines."""
    leases: bool = False
    """True to list all leases and the whole queue; False to do so only where the page stays short."""
    map: bool = True
    """False for the leases and the queue alone."""
    nothing: str = ""
    """Shown where there are neither leases nor waiting requests."""


def render(node: Status, page: Page) -> str:
    """Return the page as plain text."""
    body = _map(node, page) if page.map else []
    rows, queue = _lease_table(node, page), _queue(node, page)
    listed = [rows] if rows else []
    if page.nothing and not rows and not queue:
        listed = [[page.nothing]]
    if page.leases:
        parts = [head(node), *body, *listed, *queue]
        return _joined(parts, blank=True)
    # The first that is short enough: with all leases, without blank lines, without leases, with a part of the queue.
    whole = [head(node), *body, *listed, *queue]
    if _height(whole, blank=False) <= MOST_LINES:
        return _joined(whole, blank=_height(whole, blank=True) <= MOST_LINES)
    short = [head(node, hidden=bool(rows)), *body]
    queue = _queue(node, page, most=max(_LEAST_QUEUE, MOST_LINES - _height(short, blank=False)))
    short += queue
    return _joined(short, blank=_height(short, blank=True) <= MOST_LINES)


def _joined(parts: Sequence[Sequence[str]], *, blank: bool) -> str:
    return ("\n\n" if blank else "\n").join("\n".join(part) for part in parts)


def _height(parts: Sequence[Sequence[str]], *, blank: bool) -> int:
    return sum(map(len, parts)) + (len(parts) - 1 if blank else 0)


def head(node: Status, *, hidden: bool = False) -> list[str]:
    """Return the summary and what is wrong. `hidden`: say how to see the leases."""
    waiting = f", {len(node.queue)} waiting" if node.queue else ""
    leases = counted(len(node.leases), "lease") + (" (`--leases` lists them)" if hidden else "")
    lines = [f"{node.node}: {counted(len(node.gpus), 'GPU')}, {leases}{waiting} (revision {node.revision})"]
    if node.paused:
        lines.append(f"paused: {'; '.join(node.paused)}")
    if node.ledger_doubt is not None:
        lines += _doubt(node.ledger_doubt)
    lines += [f"the socket {each}" for each in node.socket_problems]
    lines += node.problems
    if node.ledger_error:
        lines.append(f"no new leases: {node.ledger_error}")
    return [one_line(each) for each in lines]


def _map(node: Status, page: Page) -> list[list[str]]:
    """Return the GPUs, what is to be said of them, and what fits now."""
    gpus = slice_maps(node)
    legend, notes = map_legend([node], page), map_notes(node)
    fits = fits_lines(node.available, node.largest_share_mib, page)
    if page.boxes:
        boxes = [render_text(each, page.width, color=page.color, unicode=page.unicode).splitlines() for each in gpus]
        return [*boxes, *filter(None, (legend, notes))]  # what fits is counted over all GPUs
    lines = render_lines(gpus, page.width, color=page.color, unicode=page.unicode)
    return [part for part in ([*lines, *legend], fits, notes) if part]


def map_legend(nodes: Sequence[Status], page: Page) -> list[str]:
    """Return the line that explains the fills of these nodes' maps; nothing where every slice is free."""
    gpus = [each for node in nodes for each in slice_maps(node)]
    states = {each.state for gpu in gpus for each in gpu.blocks}
    states |= {UNUSABLE} if any(each.unusable for each in gpus) else set()
    return [render_legend([*states, FREE], color=page.color, unicode=page.unicode)] if states else []


def map_notes(node: Status) -> list[str]:
    """Return what does not fit into the map of a node, a line each."""
    notes = [one_line(note) for each in node.gpus for note in _notes(each)]
    return notes + [one_line(f"GPU {index} has not answered yet: {why}") for index, why in node.missing_gpus.items()]


def fits_lines(available: Sequence[Available], largest_share_mib: int, page: Page) -> list[str]:
    """Return what could be leased now, one kind at a time, in profiles and in memory; nothing from an older agent.

    `largest_share_mib` is the largest share of a GPU that fits, 0 if none does.
    """
    if not available:
        return []
    fitting = [each for each in available if each.count]
    if not fitting and not largest_share_mib:
        return ["fits now: nothing"]
    kinds = [
        counted(each.count, "whole GPU") if each.profile == WHOLE else f"{each.count} x {each.profile}"
        for each in fitting
    ]
    if largest_share_mib:
        kinds.append(f"shares of up to {format_mib(largest_share_mib)}".replace(" ", "\u00a0"))
    most = format_mib(max(largest_share_mib, *(each.memory_mib for each in fitting), 0))
    # Only the blanks between kinds may become line ends.
    unbroken = ", ".join(kind.replace(" ", "\u00a0") for kind in kinds)
    text = f"fits now (up to {most}), {'any one of' if len(kinds) > 1 else 'just'}: {unbroken}"
    lines = textwrap.wrap(
        text,
        page.width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=None if page.leases else _MOST_FITS_LINES,
        placeholder=" ...",
    )
    return [line.replace("\u00a0", " ") for line in lines]


def _notes(gpu: Gpu) -> Iterator[str]:
    """Yield what does not fit into the map."""
    if gpu.reason and not gpu.draining:  # a drain says who began it
        yield gpu_state(gpu)
    if gpu.draining:
        yield _drain(gpu)
    if gpu.mig.current != gpu.mig.pending and gpu.state not in {"ready", "whole"}:  # their reason says so
        yield f"GPU {gpu.index}: MIG mode will be {'on' if gpu.mig.pending else 'off'} after a reset"
    for each in gpu.instances:
        if each.state == "blocked" and each.reason:
            yield f"{each.label} on {place(gpu.index, each.placement)} is blocked: {each.reason}"


def _drain(gpu: Gpu) -> str:
    leases = len({each.lease for each in gpu.instances if each.lease})
    by = gpu.reason if gpu.reason.startswith("drained ") else "drained"
    between = "; " if ": " in by else ": "
    if not leases:
        return f"GPU {gpu.index} is {by}{between}nothing is leased there"
    if gpu.drain_deadline is None:
        how = "it is empty when its leases end"
    elif gpu.drain_deadline > time.time():
        how = f"it is empty in {until(gpu.drain_deadline)} at the latest"
    else:
        how = f"its deadline is over, and {counted(leases, 'lease')} {'is' if leases == 1 else 'are'} still there"
    return f"GPU {gpu.index} is being {by}{between}{how}"


def _lease_table(node: Status, page: Page) -> list[str]:
    """Return the table of the leases; nothing if there are none."""
    header, *rows = lease_rows(node.leases)
    if not rows:
        return []
    whole = table(header, rows).splitlines()
    if not page.cut or max(map(len, whole)) <= page.width:
        return whole
    if header[-1] != LEASE_COLUMNS[-1] or max(len(row[-1]) for row in rows) <= _WIDEST_NOTE:
        return table(header, rows, width=page.width, bends=(1,)).splitlines()
    # Notes that make the rows too long go below them.
    first, *lines = table(header[:-1], [row[:-1] for row in rows], width=page.width, bends=(1,)).splitlines()
    below = [textwrap.wrap(one_line(row[-1]), page.width - 4) for row in rows]
    return [first, *(each for line, note in zip(lines, below, strict=True) for each in (line, *_indented(note)))]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def lease_rows(leases: Sequence[LeaseInfo]) -> list[tuple[str, ...]]:
    """Return the header and a row for each device of each lease."""
    rows = [LEASE_COLUMNS, *(row for each in leases for row in _lease(each))]
    return rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]


def _lease(each: LeaseInfo) -> Iterator[tuple[str, ...]]:
    # A warning of idleness says more than that the lease is unused.
    unused = ["unused"] if each.unused and not each.warning else []
    marks = [*unused, *(["reserved"] if each.promised else []), *([each.warning] if each.warning else [])]
    holder = each.holder or each.tenant or "-"
    times = (ago(each.created_at), until(each.expires_at))
    for number in range(max(1, len(each.devices))):
        first = number == 0
        gpu, slices, profile, lost = _device(each, number)
        note = ", ".join(([*marks] if first else []) + ([lost] if lost else []))
        yield (*((each.id, holder) if first else ("", "")), gpu, slices, profile, *(times if first else ("", "")), note)


def _device(lease: LeaseInfo, number: int) -> tuple[str, str, str, str]:
    """Return GPU, slices and profile of one device, and for a lost one what is still known of it."""
    if number >= len(lease.devices):
        return "-", "-", "-", ""
    each = lease.devices[number]
    slices = "-" if each.is_share else "all"
    if each.placement is not None:
        slices = _numbers(each.placement.start, each.placement.size)
    if each.uuid:
        return str(each.gpu_index), slices, each.label, ""
    kubelet = f" ({lease.kubelet_devices[number]})" if number < len(lease.kubelet_devices) else ""
    lost = f"lost{kubelet}"
    return (str(each.gpu_index), slices, each.label, lost) if each.profile else ("-", "-", "-", lost)


def _numbers(start: int, size: int) -> str:
    return str(start) if size == 1 else f"{start}-{start + size - 1}"


def _queue(node: Status, page: Page, most: int | None = None) -> list[list[str]]:
    """Return the waiting requests and when GPUs are reserved, in at most `most` lines; nothing if none waits."""
    if not node.queue:
        return []
    notes = [line for each in node.queue if each.reserved_gpus for line in _reservation(each, page)]
    if not notes and node.reservation_after is not None and not node.strict_fifo:
        after = format_duration(node.reservation_after)
        notes = [f"after {after} in the queue, GPUs are reserved for the request that is first"]
    limits = [line for each in node.queue if each.limit for line in _limit(each, page)]
    shown = node.queue
    if most is None or 1 + len(shown) + len(notes) + len(limits) <= most:
        notes += limits
    elif 1 + len(shown) + len(notes) > most:
        notes = notes if most > _LEAST_QUEUE else []
        if 1 + len(shown) + len(notes) > most:
            shown = node.queue[: most - 2 - len(notes)]
    left = len(node.queue) - len(shown)
    return [[*_queue_table(shown, page), *([f"and {left} more"] if left else []), *notes]]


def _reservation(each: Waiting, page: Page) -> list[str]:
    """Return which GPUs are reserved for a request; on a terminal in lines that fit."""
    gpus = ", ".join(map(str, each.reserved_gpus))
    are = f"GPU {gpus} is" if len(each.reserved_gpus) == 1 else f"GPUs {gpus} are"
    text = one_line(f"{are} reserved for place {each.position}: {each.wants} of {each.holder or 'somebody'}")
    return textwrap.wrap(text, page.width, subsequent_indent="  ") if page.cut else [text]


def _limit(each: Waiting, page: Page) -> list[str]:
    """Return which limit a request waits for; on a terminal in lines that fit."""
    text = one_line(f"place {each.position} {OWN_LIMIT}: {each.limit}")
    return textwrap.wrap(text, page.width, subsequent_indent="  ") if page.cut else [text]


def _queue_table(shown: Sequence[Waiting], page: Page) -> list[str]:
    header, *rows = queue_rows(shown)
    if not page.cut:
        return table(header, rows).splitlines()
    if max(map(len, table(header, rows).splitlines())) > page.width:
        header, *rows = queue_rows(shown, ends=False)
    cut = [column for column, name in enumerate(header) if name in CUT_IN_QUEUE]
    return table(header, rows, width=page.width, bends=cut, drops=_LEFT_OUT_OF_QUEUE).splitlines()


def queue_rows(waiting: Sequence[Waiting], *, ends: bool = True) -> list[tuple[str, ...]]:
    """Return the header and a row for each waiting request; with `ends` also when the leases that block it end.

    Request ids and priorities only where there are any, which leaves space for what blocks.
    """
    ids = short_ids([each.request_id for each in waiting])
    rows = [QUEUE_COLUMNS, *(_waiting(each, ids.get(each.request_id, "-"), ends=ends) for each in waiting)]
    needless = {"REQUEST"} if not ids else set()
    needless |= {"PRIORITY"} if not any(each.priority for each in waiting) else set()
    kept = [number for number, name in enumerate(QUEUE_COLUMNS) if name not in needless]
    return [tuple(row[number] for number in kept) for row in rows]


def _waiting(each: Waiting, request: str, *, ends: bool) -> tuple[str, ...]:
    blocked = "its own limit" if each.limit else blocked_by(each.blockers, brief=True, ends=ends)
    start = start_interval(each.estimate).removeprefix("in ")
    wait = (ago(each.since), start or "-", blocked or "-")
    return (str(each.position), request, each.holder or "-", each.wants, str(each.priority), *wait)


def _doubt(doubt: LedgerDoubt) -> Iterator[str]:
    """Yield lines for people, which say what happened to the ledger and what to type next."""
    yield f"the ledger {doubt.why}" + (f"; the former one is kept as {doubt.kept_as}" if doubt.kept_as else "")
    if doubt.restored:
        yield "leases since then are not known: what the ledger does not account for is foreign, and left alone"
    else:
        yield "leases from before do not count: what the ledger does not account for is foreign, and left alone"
    if doubt.recoverable:
        known = counted(doubt.recoverable, "lease")
        yield f"{known} from before can be recovered: whoever has the token types `migctl recover`, or with LEASE"
    yield "what is no longer needed: `migctl adopt UUID ...` or `migctl adopt --all`, as administrator"
