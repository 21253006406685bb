"""Draws a GPU's memory as text: which instance is on which slices, or which share has how much, and what is free.

`SliceMapGpu` is a small input of its own, so that the command line can build it from the JSON of a status as well as
the agent from a NodeView.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from mig_agent.core.quantities import format_mib
from mig_agent.core.texts import visible

FREE = "free"
UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMapBlock:
    """One instance on the map; positions in memory slices, and in MiB on a shared GPU."""

    start: int
    size: int
    label: str
    """The profile: `3g.40gb`, or the memory of a share: `4 GiB`."""
    state: str
    """An InstanceState, or `free`."""
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMapGpu:
    """One GPU of the map. Without memory slices (a lost GPU) only the title is drawn."""

    title: str
    memory_slices: int
    blocks: tuple[SliceMapBlock, ...] = ()
    name: str = ""
    """A short title, for maps of one line."""
    unusable: frozenset[int] = frozenset()
    """The free slices that no profile can use beside the blocks."""
    shared_mib: int = 0
    """The memory that shares of the GPU can take, which is the axis of its blocks; 0 if it is not shared."""

    @property
    def length(self) -> int:
        """The length of the axis, in memory slices or MiB."""
        return self.shared_mib or self.memory_slices


@dataclass(frozen=True, slots=True)
class StateStyle:
    """The look of a state: a fill that distinguishes it without colour, and a colour."""

    fill: str
    ascii_fill: str
    ansi: str
    """The parameter of the terminal's colour sequence."""
    meaning: str = ""
    """For the legend, where the state's name does not say it."""


STYLES = {
    "leased": StateStyle("█", "#", "32"),
    "idle": StateStyle("░", ".", "36"),
    "foreign": StateStyle("▒", "/", "35"),
    "blocked": StateStyle("╳", "x", "31"),  # noqa: RUF001 -- the cross of the box-drawing block, on purpose
    "creating": StateStyle("+", "+", "33"),
    "destroying": StateStyle("-", "-", "33"),
    FREE: StateStyle(" ", " ", "2"),
    UNUSABLE: StateStyle("╱", ":", "2", "no profile fits"),  # noqa: RUF001 -- a diagonal of the box-drawing block
}
_UNKNOWN = StateStyle("?", "?", "31")
_MIB_IN_GIB = 1024
_ROWS = 4
_HOLDER_ROW = 3
_NARROWEST = 3
"""Columns of the narrowest slice, its border included."""
_NARROWEST_IN_LINE = 5
"""The same where a GPU is one line: for less, names are cut first."""
_LEAST_NAME = 6
"""Columns for the name of a GPU that are never cut: `GPU 12`."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """The characters that frames are drawn with."""

    top: tuple[str, str, str]
    bottom: tuple[str, str, str]
    across: str
    down: str
    cut: str


_UNICODE = _Lines(("┌", "┬", "┐"), ("└", "┴", "┘"), "─", "│", "…")
_ASCII = _Lines(("+", "+", "+"), ("+", "+", "+"), "-", "|", "~")


def style_of(state: str) -> StateStyle:
    """Return the look of a state; a state that this version does not know gets a look, too."""
    return STYLES.get(state, _UNKNOWN)


def render_text(gpu: SliceMapGpu, width: int = 80, *, color: bool = False, unicode: bool = True) -> str:
    """Draw one GPU: several lines, at most `width` columns wide where that is possible.

    Every state has a fill of its own and its name, so colour is not needed to read it.
    """
    title = _fitted(_plain(gpu.title, unicode=unicode), max(1, width), _UNICODE if unicode else _ASCII).rstrip()
    if gpu.length < 1:
        return title
    lines = _UNICODE if unicode else _ASCII
    blocks = filled(gpu)
    widths = _widths(gpu, blocks, width - 1)
    cells = (
        (
            _cell(block, row, inner, lines, color=color, unicode=unicode)
            for block, inner in zip(blocks, widths, strict=True)
        )
        for row in range(_ROWS)
    )
    rows = (lines.down + lines.down.join(each) + lines.down for each in cells)
    edge, axis = _edge(widths, lines.top, lines), _axis(gpu, blocks, widths, lines)
    return "\n".join(row.rstrip() for row in (title, edge, *rows, axis))


def render_lines(
    gpus: Sequence[SliceMapGpu], width: int = 80, *, color: bool = False, unicode: bool = True, slices: int = 0
) -> list[str]:
    """Draw each GPU in one line, with the numbers of the slices above the first one and wherever they change.

    Each block shows its state by its first character, then its holder, or its profile where nobody holds it; both where
    they fit. Lines are at most `width` columns wide where that is possible. `slices` is the most that a GPU elsewhere
    on the page has, so that all end in the same column.
    """
    lines = _UNICODE if unicode else _ASCII
    names = [_plain(each.name, unicode=unicode) for each in gpus]
    most_slices = max((each.memory_slices for each in gpus), default=0)
    most_slices = max(most_slices, slices)
    least_area = most_slices * _NARROWEST_IN_LINE + 1
    name_width = max(_LEAST_NAME, min(max(map(_columns, names), default=0), width - 1 - least_area))
    area = max(_NARROWEST, (width - name_width - 2) // max(1, most_slices)) * most_slices
    drawn: list[str] = []
    numbered = 1  # one slice needs no number
    for gpu, name in zip(gpus, names, strict=True):
        if gpu.length < 1:
            drawn.append(_fitted(name, max(1, width), lines).rstrip())
            continue
        if not gpu.shared_mib and gpu.memory_slices not in {1, numbered}:
            numbered = gpu.memory_slices
            cell = area // numbered
            numbers = "".join(str(number).ljust(cell) for number in range(numbered))
            drawn.append((" " * (name_width + 2) + numbers).rstrip())
        blocks = filled(gpu)
        cells = (
            _line_cell(block, inner, lines, color=color, unicode=unicode)
            for block, inner in zip(blocks, _widths(gpu, blocks, area), strict=True)
        )
        drawn.append(f"{_fitted(name, name_width, lines)} {lines.down}{lines.down.join(cells)}{lines.down}")
    return drawn


def _line_cell(block: SliceMapBlock, inner: int, lines: _Lines, *, color: bool, unicode: bool) -> str:
    """Return a block in one row: the fill of its state, then whose it is and what it is."""
    style = style_of(block.state)
    fill = style.fill if unicode else style.ascii_fill
    if block.state in {FREE, UNUSABLE}:
        label = _plain(block.label, unicode=unicode)
        free = f" {label} {block.state}" if label else ""
        return _painted(free.ljust(inner) if free and len(free) <= inner else fill * inner, style, color=color)
    holder, label = _plain(block.holder, unicode=unicode), _plain(block.label, unicode=unicode)
    both = f"{holder} {label}" if holder else label
    text = both if _columns(both) < inner else holder or label
    return _painted(fill, style, color=color) + _fitted(text, inner - 1, lines)


def render_legend(states: Iterable[str] | None = None, *, color: bool = False, unicode: bool = True) -> str:
    """Return one line that explains the fills: of all states, or of those given."""
    shown = list(STYLES) if states is None else [state for state in STYLES if state in set(states)]
    parts = []
    for state in shown:
        style = style_of(state)
        fill = (style.fill if unicode else style.ascii_fill) * 2
        meaning = f" ({style.meaning})" if style.meaning else ""
        parts.append(f"{_painted(f'[{fill}]', style, color=color)} {state}{meaning}")
    return "  ".join(parts)


def filled(gpu: SliceMapGpu) -> tuple[SliceMapBlock, ...]:
    """Return the blocks in order with the free ranges between them as blocks, together exactly as wide as the GPU.

    A block that overlaps one before it, or reaches beyond the GPU, is cut; nothing is drawn twice.
    """
    blocks: list[SliceMapBlock] = []
    position = 0
    for block in sorted(gpu.blocks, key=lambda each: each.start):
        start, end = max(block.start, position), min(block.start + block.size, gpu.length)
        if start >= end:
            continue
        if start > position:
            blocks += _free(gpu, position, start)
        blocks.append(
            SliceMapBlock(start=start, size=end - start, label=block.label, state=block.state, holder=block.holder)
        )
        position = end
    if position < gpu.length:
        blocks += _free(gpu, position, gpu.length)
    return tuple(blocks)


def _free(gpu: SliceMapGpu, start: int, end: int) -> list[SliceMapBlock]:
    """Return the free range as blocks: one of each run of slices that are usable, or that are not."""
    if gpu.shared_mib:
        return [SliceMapBlock(start=start, size=end - start, label=format_mib(end - start), state=FREE)]
    runs = groupby(range(start, end), key=lambda number: UNUSABLE if number in gpu.unusable else FREE)
    ranges = [(state, tuple(numbers)) for state, numbers in runs]
    return [SliceMapBlock(start=each[0], size=len(each), label="", state=state) for state, each in ranges]


def _widths(gpu: SliceMapGpu, blocks: Sequence[SliceMapBlock], area: int) -> list[int]:
    """Return the columns of each block without its border, in at most `area` columns where that is possible.

    Slices are all of one width. Shares have their part of the bar, the small ones at the cost of the widest.
    """
    if not gpu.shared_mib:
        cell = max(_NARROWEST, area // gpu.memory_slices)
        return [block.size * cell - 1 for block in blocks]
    ends = [(block.start + block.size) * area // gpu.shared_mib for block in blocks]
    widths = [end - begin for begin, end in pairwise([0, *ends])]
    lacking = sum(max(0, _NARROWEST - each) for each in widths)
    widths = [max(_NARROWEST, each) for each in widths]
    for _ in range(lacking):
        widest = max(range(len(widths)), key=widths.__getitem__)
        widths[widest] = max(_NARROWEST, widths[widest] - 1)
    return [each - 1 for each in widths]


def _cell(block: SliceMapBlock, row: int, inner: int, lines: _Lines, *, color: bool, unicode: bool) -> str:
    """Return one row of a block: its fill, its profile, its state, or its holder."""
    style = style_of(block.state)
    fill = (style.fill if unicode else style.ascii_fill) * inner
    text = (fill, block.label, block.state, block.holder)[row]
    fitted = _fitted(_plain(text, unicode=unicode), inner, lines)
    return fitted if row == _HOLDER_ROW else _painted(fitted, style, color=color)


def _edge(widths: Iterable[int], corners: tuple[str, str, str], lines: _Lines) -> str:
    left, between, right = corners
    return left + between.join(lines.across * each for each in widths) + right


def _axis(gpu: SliceMapGpu, blocks: Sequence[SliceMapBlock], widths: Sequence[int], lines: _Lines) -> str:
    """Return the lower edge with the number of each slice where it begins; of a shared GPU with GiB at each share."""
    line = list(_edge(widths, lines.bottom, lines))
    at = 1
    for block, inner in zip(blocks, widths, strict=True):
        if gpu.shared_mib:
            _write(line, at, f"{block.start / _MIB_IN_GIB:.1f}".removesuffix(".0"), inner)
        else:
            cell = (inner + 1) // block.size
            for number in range(block.size):
                _write(line, at + number * cell, str(block.start + number), cell)
        at += inner + 1
    return "".join(line)


def _write(line: list[str], at: int, text: str, columns: int) -> None:
    """Write a text over a line, unless it is too wide."""
    if len(text) <= columns:
        line[at : at + len(text)] = text


def _fitted(text: str, columns: int, lines: _Lines) -> str:
    """Return the text in exactly this many columns: cut, or padded with blanks."""
    if _columns(text) > columns:
        while text and _columns(text) > columns - 1:
            text = text[:-1]
        text += lines.cut
    return text + " " * (columns - _columns(text))


def _plain(text: str, *, unicode: bool) -> str:
    """Return the text on one line, without characters that move a cursor."""
    return "".join(each if unicode or each.isascii() else "?" for each in visible(text))


def _columns(text: str) -> int:
    """Return how wide a terminal shows the text: East Asian characters take two columns, combining ones none."""
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def _painted(text: str, style: StateStyle, *, color: bool) -> str:
    return f"\x1b[{style.ansi}m{text}\x1b[0m" if color else text
