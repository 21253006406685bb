"""Renders `migctl top`: instances and what is used on them, sorted, filtered and scrolled, as lines of a screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from mig_agent.core.quantities import counted, format_mib
from mig_agent.migctl.failures import one_line
from mig_agent.migctl.printing import percent

if TYPE_CHECKING:
    from mig_agent.client.types import Gpu, Instance, ProcessUsage, Status, Usage

UNKNOWN: Final = "?"
"""Shown for what the driver does not report, such as how busy an instance is before Hopper; never 0."""
_HEADER = ("GPU", "PROFILE", "STATE", "USED", "OF", "", "COMPUTE", "", "HOLDER")
"""The columns behind that of the node, which has no name and no width where there is only one."""
_STATE, _OF, _MEMORY_BAR, _COMPUTE, _COMPUTE_BAR, _HOLDER = 3, 5, 6, 7, 8, 9
_DROPPED_WHEN_NARROW = (_COMPUTE_BAR, _MEMORY_BAR, _OF)
"""The columns that a narrow terminal does without, the first that goes first."""
_HOLDER_CELLS = 16
"""Characters of the holder for which other columns are left out."""
_LEAST_CUT = 8
_BAR_CELLS = 10
_ALMOST_FULL = 0.9
_LONGEST_FILTER = 40

Segment = tuple[str, str]
"""A text, and the name of its style: empty for plain text."""
Line = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance with what is used on it."""

    instance: Instance
    gpu_index: int
    usage: Usage | None
    is_unused: bool
    shared: str = ""
    """The taken part of a whole GPU while that is shared."""
    node: str = ""
    """The name of its node; empty where only one is shown."""

    @property
    def used_mib(self) -> int | None:
        """Memory in use; None if it is not known."""
        return None if self.usage is None else self.usage.memory_used_mib

    @property
    def total_mib(self) -> int:
        """Memory of the device."""
        measured = None if self.usage is None else self.usage.memory_total_mib
        return measured or self.instance.memory_mib

    @property
    def compute_percent(self) -> float | None:
        """Compute use: an instance's multiprocessors, or a whole GPU's time with a kernel; None: unknown."""
        if self.usage is None:
            return None
        return self.usage.utilization_percent if self.usage.compute is None else self.usage.compute.sm_percent

    @property
    def processes(self) -> Sequence[ProcessUsage]:
        """Known facts of its processes."""
        return () if self.usage is None else self.usage.process_details


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One reading of the node, and the names of its users."""

    node: Status
    usage: Mapping[int, Usage]
    user_name: Callable[[int], str]
    noun: ClassVar = ""
    troubles: ClassVar[tuple[str, ...]] = ()

    def counts(self) -> list[str]:
        """Return what the first line begins with."""
        leases = f"{self.node.node}: {counted(len(self.node.leases), 'lease')}"
        return [leases, *([f"{len(self.node.queue)} waiting"] if self.node.queue else [])]

    def rows(self) -> list[InstanceRow]:
        """Return all instances, by GPU and place."""
        unused = {each.id for each in self.node.leases if each.unused}
        return [
            InstanceRow(
                each,
                gpu.index,
                self.usage.get(each.generation),
                each.lease in unused,
                "" if each.is_share else _taken(gpu),
            )
            for gpu in self.node.gpus
            for each in sorted(gpu.instances, key=_start)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReading:
    """One reading of several nodes. Users are shown by their uids, which mean others on each node."""

    noun: str
    """The word before a node's name: node, or context."""
    nodes: Mapping[str, NodeReading]
    """The reading of each node that answers, by the name under which people know it."""
    troubles: tuple[str, ...]
    """A line for each node that does not answer."""

    def counts(self) -> list[str]:
        """Return what the first line begins with."""
        found = [each.node for each in self.nodes.values()]
        waiting = sum(len(each.queue) for each in found)
        return [
            counted(len(found) + len(self.troubles), self.noun),
            *([f"no answer from {counted(len(self.troubles), self.noun)}"] if self.troubles else []),
            counted(sum(len(each.leases) for each in found), "lease"),
            *([f"{waiting} waiting"] if waiting else []),
        ]

    def rows(self) -> list[InstanceRow]:
        """Return all instances, by node, GPU and place."""
        return [replace(row, node=name) for name, each in self.nodes.items() for row in each.rows()]

    def user_name(self, uid: int) -> str:
        """Return what a user is called."""
        return f"uid {uid}"


Reading: TypeAlias = NodeReading | NodesReading


def _taken(gpu: Gpu) -> str:
    """Return how much of what a GPU can share is taken: `12% taken`; empty if it is not shared."""
    memory = gpu.shared_memory
    if memory is None or not gpu.is_shared:
        return ""
    return f"{percent(100 * memory.taken_mib / max(1, memory.usable_mib))} taken"


def _start(instance: Instance) -> int:
    return 0 if instance.placement is None else instance.placement.start


ORDERS: Final = ("gpu", "memory", "compute", "holder", "profile")
"""The orders of the rows, in the order in which the key `s` takes them."""


def _sorted(rows: Iterable[InstanceRow], order: str) -> list[InstanceRow]:
    """Return rows that are in the order of their places in another order; equal ones stay as they were."""
    match order:
        case "memory":
            return sorted(rows, key=lambda row: -(row.used_mib or 0))
        case "compute":
            return sorted(
                rows, key=lambda row: -1.0 if row.compute_percent is None else row.compute_percent, reverse=True
            )
        case "holder":
            return sorted(rows, key=lambda row: (not row.instance.holder, row.instance.holder or ""))
        case "profile":
            return sorted(rows, key=lambda row: (-row.instance.memory_mib, row.instance.profile))
    return list(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The way in which the instances are shown: a value that each key replaces."""

    order: str = "gpu"
    words: str = ""
    """Only rows that have this text somewhere, in any case."""
    is_typing: bool = False
    """True if keys go to the filter."""
    offset: int = 0
    """Number of lines of the list that are above the screen."""
    with_processes: bool = True

    def after(self, key: str, page: int, length: int) -> View | None:
        """Return the view after a key; None for the key that ends it.

        `page` is how many lines of the list the screen has, `length` how many there are.
        """
        if self.is_typing:
            return self._typed(key)
        last = max(0, length - page)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -page, "page-down": page, " ": page}
        moves |= {"home": -length, "end": length}
        if key in moves:
            return replace(self, offset=min(max(self.offset + moves[key], 0), last))
        following = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        changed = {
            "escape": replace(self, words="", offset=0),
            "/": replace(self, is_typing=True, words="", offset=0),
            "p": replace(self, with_processes=not self.with_processes, offset=0),
            "s": replace(self, order=following, offset=0),
            "q": None,
            "Q": None,
        }
        return changed.get(key, self)

    def _typed(self, key: str) -> View:
        match key:
            case "enter":
                return replace(self, is_typing=False)
            case "escape":
                return replace(self, is_typing=False, words="")
            case "backspace":
                return replace(self, words=self.words[:-1])
        if len(key) == 1 and key.isprintable() and len(self.words) < _LONGEST_FILTER:
            return replace(self, words=self.words + key)
        return self

    def keys(self, width: int) -> str:
        """Return the line that says which keys there are, and which filter is kept; as many as fit."""
        if self.is_typing:
            return f"filter: {self.words}_   (Enter keeps it, Esc removes it)"
        kept = [f"filter: {self.words} (Esc removes it)"] if self.words else []
        shown = [*kept, "q quit", f"s sort: {self.order}", "/ filter", "p processes", "arrows scroll"]
        while len(shown) > 1 and len("   ".join(shown)) > width:
            shown.pop()
        return "   ".join(shown)


def head(reading: Reading) -> str:
    """Return the first line: how many leases there are, and how much of what is leased is used."""
    leased = [row for row in reading.rows() if row.instance.lease]
    known = [row.used_mib for row in leased if row.used_mib is not None]
    parts = reading.counts()
    if leased:
        used = format_mib(sum(known)) if known else UNKNOWN
        parts.append(f"{used} used of {format_mib(sum(row.total_mib for row in leased))} leased")
    return one_line(", ".join(parts))


def list_lines(reading: Reading, view: View, width: int | None) -> tuple[Line, list[Line]]:
    """Return the header of the list, and its lines: nodes without an answer, each instance with its processes."""
    rows = [row for row in _sorted(reading.rows(), view.order) if _matches(row, view.words, reading)]
    names = (reading.noun.upper(), *_HEADER)
    cells = [names, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    columns = _columns(widths, width)
    holder_cells = None if width is None else width - sum(widths[each] + 2 for each in columns if each != _HOLDER)
    lines: list[Line] = [tuple(_cut(iter([(each, "trouble")]), width)) for each in reading.troubles]
    for row, whole in zip(rows, cells[1:], strict=True):
        texts = (*whole[:_HOLDER], _cut_inside(whole[_HOLDER], holder_cells))
        lines.append(tuple(_cut(_styled(row, texts, widths, columns), width)))
        if view.with_processes:
            lines += [tuple(_cut(_process(each, reading), width)) for each in row.processes]
    header = "  ".join(_aligned(names[column], column, widths[column]) for column in columns).rstrip()
    return tuple(_cut(iter([(header, "bold")]), width)), lines


def _columns(widths: Sequence[int], width: int | None) -> list[int]:
    """Return the columns that are shown: all, or as many as leave enough of the holder to be told from others."""
    columns = [column for column, size in enumerate(widths) if size]
    for dropped in _DROPPED_WHEN_NARROW:
        needed = sum(widths[each] + 2 for each in columns if each != _HOLDER)
        if width is None or needed + min(widths[_HOLDER], _HOLDER_CELLS) <= width:
            break
        if dropped in columns:
            columns.remove(dropped)
    return columns


def _aligned(text: str, column: int, size: int) -> str:
    return text.rjust(size) if column == _COMPUTE else text.ljust(size)


def _matches(row: InstanceRow, words: str, reading: Reading) -> bool:
    if not words:
        return True
    each = row.instance
    texts = [row.node, f"gpu {row.gpu_index}", each.label, each.state, each.holder or "", each.lease or ""]
    for process in row.processes:
        texts += [str(process.pid), process.command]
        texts += [] if process.uid is None else [reading.user_name(process.uid)]
    return any(words.lower() in text.lower() for text in texts)


def _cells(row: InstanceRow) -> tuple[str, ...]:
    each, usage = row.instance, row.usage
    holder = (each.holder or "-") + (" (unused)" if row.is_unused else "")
    if usage is not None and not usage.process_details and usage.processes:
        holder += f" (pid {', '.join(map(str, usage.processes))})"
    return (
        one_line(row.node),
        str(row.gpu_index),
        "shared" if row.shared else each.label,
        row.shared or each.state,
        UNKNOWN if row.used_mib is None else format_mib(row.used_mib),
        format_mib(row.total_mib),
        _bar(row.used_mib, row.total_mib),
        UNKNOWN if row.compute_percent is None else percent(row.compute_percent),
        "" if row.compute_percent is None else _bar(row.compute_percent, 100),
        one_line(holder),
    )


def _bar(used: float | None, whole: float) -> str:
    if used is None or not whole:
        return UNKNOWN.center(_BAR_CELLS)
    # Full only for all of it, and empty only for nothing.
    full = _BAR_CELLS if used >= whole else min(_BAR_CELLS - 1, math.ceil(used * _BAR_CELLS / whole))
    return "#" * full + "." * (_BAR_CELLS - full)


def _styled(row: InstanceRow, texts: Sequence[str], widths: Sequence[int], columns: Sequence[int]) -> Iterator[Segment]:
    nearly_full = row.used_mib is not None and row.used_mib >= _ALMOST_FULL * row.total_mib
    styles = {_STATE: row.instance.state, _MEMORY_BAR: "full" if nearly_full else "bar", _COMPUTE_BAR: "bar"}
    for column in columns:
        last = column == columns[-1]
        yield texts[column] if last else _aligned(texts[column], column, widths[column]), styles.get(column, "")
        if not last:
            yield "  ", ""


def _process(each: ProcessUsage, reading: Reading) -> Iterator[Segment]:
    user = UNKNOWN if each.uid is None else reading.user_name(each.uid)
    used = UNKNOWN if each.memory_used_mib is None else format_mib(each.memory_used_mib)
    yield one_line(f"     {each.pid:>7}  {user}  {used}  {each.command or UNKNOWN}"), "process"


def _cut(segments: Iterator[Segment], width: int | None) -> Iterator[Segment]:
    """Yield the segments that fit into `width` characters; two dots end a line that does not."""
    whole = list(segments)
    if width is None or sum(len(text) for text, _ in whole) <= width:
        yield from whole
        return
    left = width - 2
    for text, style in whole:
        if len(text) > left:
            yield text[: max(0, left)], style
            break
        yield text, style
        left -= len(text)
    yield "..", ""


def _cut_inside(text: str, size: int | None) -> str:
    """Return a text of at most `size` characters, if it is 8 or more: the ends of names tell one job from another."""
    if size is None or len(text) <= size or size < _LEAST_CUT:
        return text
    end = (size - 2) // 2
    return f"{text[: size - 2 - end]}..{text[-end:]}"


def page(reading: Reading, view: View, width: int, height: int, trouble: str = "") -> list[Line]:
    """Return the whole screen: the head, the keys, and as much of the list as there is place for.

    `trouble` says why the reading is old, in place of the head.
    """
    header, lines = list_lines(reading, view, width)
    size = page_size(height)
    # The list may have become shorter, or the screen higher, since it was scrolled.
    offset = min(view.offset, max(0, len(lines) - size))
    shown = lines[offset : offset + size]
    more = len(lines) - offset - len(shown)
    below = f"{more} more below" if more > 0 else ""
    top = [(trouble, "trouble") if trouble else (head(reading), "bold"), (view.keys(width), "keys")]
    screen: list[Line] = [tuple(_cut(iter([each]), width)) for each in top]
    if not lines:
        return [*screen, (), ((nothing(view), ""),)]
    return [*screen, header, *shown, *([((below, "keys"),)] if below else [])]


def nothing(view: View) -> str:
    """Return what is shown in place of an empty list."""
    return "no instance has that in it" if view.words else "no instances"


def page_size(height: int) -> int:
    """Return how many lines of the list a screen of this height has, beside the head, the keys, and what is below."""
    return max(1, height - 4)


def plain(lines: Sequence[Line]) -> str:
    """Return lines without their styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
