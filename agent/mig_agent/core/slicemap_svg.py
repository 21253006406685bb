"""Draws the map of slices as SVG, for documents, notebooks and the web page; `slicemap` draws it as text.

Colours are attributes, and shapes have classes, so that a page can override them. Nothing in it loads another file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mig_agent.core.slicemap import FREE, UNUSABLE, SliceMapBlock, SliceMapGpu, filled, style_of
from mig_agent.core.texts import visible

_TITLE = 26
_GAP = 16
_LEGEND = 30
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_COLORS = {
    "leased": ("#23824a", "#ffffff"),
    "idle": ("#cfe8f7", "#1d3b4f"),
    "foreign": ("#b79bd8", "#241436"),
    "blocked": ("#c8443a", "#ffffff"),
    "creating": ("#f2c14e", "#3d2f00"),
    "destroying": ("#f2c14e", "#3d2f00"),
    FREE: ("#f4f5f7", "#5c646d"),
    UNUSABLE: ("#e3e5e9", "#5c646d"),
}
_UNKNOWN = ("#999999", "#000000")
_INK, _FAINT, _PAPER = "#1f2328", "#5c646d", "#ffffff"
# Patterns distinguish the states without colour.
_PATTERNS = {
    "idle": '<circle cx="4" cy="4" r="1.2" fill="#7fb7dc"/>',
    "foreign": '<path d="M0 8 L8 0" stroke="#8f6fbb" stroke-width="1.5"/>',
    "blocked": '<path d="M0 0 L8 8 M0 8 L8 0" stroke="#9c2f27" stroke-width="1.2"/>',
    "creating": '<path d="M4 1 V7 M1 4 H7" stroke="#c99516" stroke-width="1.2"/>',
    UNUSABLE: '<path d="M0 8 L8 0" stroke="#c3c8cf" stroke-width="1"/>',
    "destroying": '<path d="M0 4 H8" stroke="#c99516" stroke-width="1.5"/>',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Lengths of one drawing, in pixels."""

    width: int
    margin: int
    bar: int
    axis: int
    font: int
    row: int
    """Distance from one line of text in a block to the next."""
    padding: int
    letter: float
    """Roughly the width of a letter: enough to cut texts that would not fit."""


_PAGE = _Sizes(width=760, margin=20, bar=64, axis=18, font=12, row=17, padding=8, letter=7.3)
_TILE = _Sizes(width=440, margin=2, bar=50, axis=16, font=11, row=14, padding=4, letter=6.6)
_BOLD = 1.12
"""Width of bold letters relative to plain ones."""
_MIB_IN_GIB = 1024
_STEPS_GIB = (1, 2, 4, 8, 16, 32, 64)
"""Distances between the labels of a shared GPU's axis."""
_MOST_LABELS = 12
_LAST_LABEL = 0.97
"""The part of the axis beyond which it has no label."""
_LEAST_LETTERS = 3
"""A text of which fewer letters would be shown is left out."""


def render_svg(gpus: Sequence[SliceMapGpu], *, caption: str = "") -> str:
    """Return an SVG document with one bar for each GPU and a legend of the states in it."""
    sizes, states = _PAGE, _states(gpus)
    parts: list[str] = []
    top = float(sizes.margin)
    if caption:
        parts.append(_text(sizes.margin, top + 12, caption, size=15, weight=600))
        top += 28
    for gpu in gpus:
        parts += _gpu(gpu, top, sizes)
        top += _TITLE + (sizes.bar + sizes.axis if gpu.length else 0) + _GAP
    parts += _legend(states, sizes.margin, top, sizes)
    height = top + (_LEGEND if states else 0)
    paper = f'<rect class="paper" width="{sizes.width}" height="{height:g}" rx="8" fill="{_PAPER}"/>'
    title = caption or "Map of GPU memory"
    said = "; ".join(map(describe, gpus))
    return _document(title, said, (sizes.width, height), [*_patterns(_PATTERNS), paper, *parts])


def render_tile(gpu: SliceMapGpu) -> str:
    """Return a small SVG document of one GPU, on a transparent ground, for pages of many."""
    height = _TITLE + (_TILE.bar + _TILE.axis if gpu.length else 0)
    drawn = _gpu(gpu, 0, _TILE)
    return _document(gpu.title, describe(gpu), (_TILE.width, height), [*_patterns(_states([gpu])), *drawn])


def render_legend(gpus: Sequence[SliceMapGpu]) -> tuple[str, ...]:
    """Return small SVG documents, one for each state in the tiles of these GPUs, which say what its fill means."""
    return tuple(_legend_entry(each) for each in _states(gpus))


def describe(gpu: SliceMapGpu) -> str:
    """Return what is on which slices in words: `GPU 0: slices 0-3: 3g.40gb, leased, alice; slice 4: free`.

    Of a shared GPU: `GPU 1: 4 GiB, leased, alice; 39 GiB, free`.
    """
    return f"{visible(gpu.title)}: " + "; ".join(_described(gpu, block) for block in filled(gpu))


def _described(gpu: SliceMapGpu, block: SliceMapBlock) -> str:
    return _words(block) if gpu.shared_mib else f"{_slices(block)}: {_words(block)}"


def _document(title: str, said: str, size: tuple[float, float], parts: Iterable[str]) -> str:
    width, height = size
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" font-family="{escape(_FONT)}" font-size="12" role="img">'
    )
    described = [f"<desc>{escape(_printable(said))}</desc>"] if said else []
    return "\n".join([head, f"<title>{escape(_printable(title))}</title>", *described, *parts, "</svg>", ""])


def _states(gpus: Sequence[SliceMapGpu]) -> list[str]:
    """Return the states in the map, in the order of a legend."""
    there = {block.state for gpu in gpus for block in filled(gpu)}
    return [known for known in _COLORS if known in there]


def _patterns(states: Iterable[str]) -> list[str]:
    shapes = {each: _PATTERNS[each] for each in states if each in _PATTERNS}
    patterns = (
        f'<pattern id="fill-{state}" width="8" height="8" patternUnits="userSpaceOnUse">{shape}</pattern>'
        for state, shape in shapes.items()
    )
    return ["<defs>", *patterns, "</defs>"]


def _gpu(gpu: SliceMapGpu, top: float, sizes: _Sizes) -> list[str]:
    title = _cut(gpu.title, sizes.width - 2 * sizes.margin, sizes.letter * 13 / sizes.font)
    parts = [_text(sizes.margin, top + 14, title, size=13, weight=600)]
    if gpu.length < 1:
        return parts
    scale = (sizes.width - 2 * sizes.margin) / gpu.length
    bar_top = top + _TITLE
    for block in filled(gpu):
        parts += _block(block, _described(gpu, block), bar_top, scale, sizes)
    for at, text in _axis(gpu):
        left = sizes.margin + at * scale
        parts.append(_text(left + 2, bar_top + sizes.bar + 13, text, size=10, fill=_FAINT, kind="faint"))
    return parts


def _axis(gpu: SliceMapGpu) -> Iterator[tuple[int, str]]:
    """Yield the labels of the axis and where they are: the number of each slice, or GiB in round steps."""
    if not gpu.shared_mib:
        yield from ((number, str(number)) for number in range(gpu.memory_slices))
        return
    whole = gpu.shared_mib // _MIB_IN_GIB
    step = next((each for each in _STEPS_GIB if whole <= each * _MOST_LABELS), _STEPS_GIB[-1])
    for gib in range(0, whole + 1, step):
        # One at the very end would reach beyond the bar.
        if gib * _MIB_IN_GIB < gpu.shared_mib * _LAST_LABEL:
            yield gib * _MIB_IN_GIB, f"{gib} GiB" if gib == 0 else str(gib)


def _block(block: SliceMapBlock, hover: str, top: float, scale: float, sizes: _Sizes) -> list[str]:
    left, width = sizes.margin + block.start * scale + 1, max(block.size * scale - 2, 1.0)
    _, ink = _COLORS.get(block.state, _UNKNOWN)
    parts = _box(block.state, left, top, width, sizes.bar)
    space = width - 2 * sizes.padding + 2
    state = block.state if len(block.state) * sizes.letter <= space else ""  # its fill says the same
    texts = (_cut(block.label, space, sizes.letter), state, _cut(block.holder, space, sizes.letter))
    for row, text in enumerate(text for text in texts if text):
        at = top + sizes.font + 4 + sizes.row * row + (sizes.row - sizes.font) / 2
        weight = 600 if row == 0 and len(text) * sizes.letter * _BOLD <= space else 400
        kind = f"on-{_class(block.state)}"
        parts.append(_text(left + sizes.padding, at, text, size=sizes.font, weight=weight, fill=ink, kind=kind))
    return ["<g>", f"<title>{escape(_printable(hover))}</title>", *parts, "</g>"]


def _words(block: SliceMapBlock) -> str:
    return ", ".join(visible(text) for text in (block.label, block.state, block.holder) if text)


def _slices(block: SliceMapBlock) -> str:
    return f"slice {block.start}" if block.size == 1 else f"slices {block.start}-{block.start + block.size - 1}"


def _box(state: str, left: float, top: float, width: float, height: float) -> list[str]:
    paper, _ = _COLORS.get(state, _UNKNOWN)
    frame = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"'
    dashes = ' stroke="#c3c8ce" stroke-dasharray="4 3"' if state == FREE else ""
    parts = [f'<rect class="{_class(state)}" {frame} fill="{paper}"{dashes}/>']
    if state in _PATTERNS:
        parts.append(f'<rect {frame} fill="url(#fill-{state})" opacity="0.6"/>')
    return parts


def _class(state: str) -> str:
    """Return the state as a class; one that this version does not know has none of its own."""
    return state if state in _COLORS else "unknown"


def _meaning(state: str) -> str:
    meaning = style_of(state).meaning
    return f"{state} ({meaning})" if meaning else state


def _legend_width(state: str, sizes: _Sizes) -> float:
    return 22 + len(_meaning(state)) * sizes.letter + 18


def _legend(states: Iterable[str], left: float, top: float, sizes: _Sizes) -> list[str]:
    parts: list[str] = []
    for state in states:
        parts += [*_box(state, left, top, 16, 12), _text(left + 22, top + 10, _meaning(state), size=11)]
        left += _legend_width(state, sizes)
    return parts


def _legend_entry(state: str) -> str:
    drawn = _legend([state], _TILE.margin, 3, _TILE)
    return _document(_meaning(state), "", (_legend_width(state, _TILE), 18), [*_patterns([state]), *drawn])


def _text(
    left: float, base: float, text: str, *, size: int, weight: int = 400, fill: str = _INK, kind: str = "ink"
) -> str:
    words = escape(_printable(text))
    place = f'x="{left:.1f}" y="{base:.1f}" font-size="{size}" font-weight="{weight}"'
    return f'<text class="{kind}" {place} fill="{fill}">{words}</text>'


def _cut(text: str, width: float, letter: float) -> str:
    """Return as much of a text as fits; nothing where that would be too little to read."""
    most = int(width / letter)
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…" if most > _LEAST_LETTERS else ""


def _printable(text: str) -> str:
    """Return the text with its control characters made visible: XML allows none, not even escaped ones."""
    return visible(text)
