"""Draws the map of slices as an SVG picture for documents; `mig_agent.core.slicemap` draws it as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mig_agent.core.slicemap import FREE, UNUSABLE, SliceMapBlock, SliceMapGpu, filled
from mig_agent.core.texts import visible

_WIDTH = 760
_MARGIN = 20
_TITLE = 26
_BAR = 64
_AXIS = 18
_GAP = 16
_LEGEND = 30
_LETTER = 7.3
"""Roughly the width of a letter of 12 pixels: enough to cut texts that would not fit."""
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_COLORS = {
    "leased": ("#2f9e5b", "#ffffff"),
    "idle": ("#cfe8f7", "#1d3b4f"),
    "foreign": ("#b79bd8", "#241436"),
    "blocked": ("#e0655b", "#ffffff"),
    "creating": ("#f2c14e", "#3d2f00"),
    "destroying": ("#f2c14e", "#3d2f00"),
    FREE: ("#f4f5f7", "#7a828c"),
    UNUSABLE: ("#e3e5e9", "#7a828c"),
}
_UNKNOWN = ("#999999", "#000000")
# Patterns distinguish the states without colour.
_PATTERNS = {
    "idle": '<circle cx="4" cy="4" r="1.2" fill="#7fb7dc"/>',
    "foreign": '<path d="M0 8 L8 0" stroke="#8f6fbb" stroke-width="1.5"/>',
    "blocked": '<path d="M0 0 L8 8 M0 8 L8 0" stroke="#b8423a" stroke-width="1.2"/>',
    "creating": '<path d="M4 1 V7 M1 4 H7" stroke="#c99516" stroke-width="1.2"/>',
    UNUSABLE: '<path d="M0 8 L8 0" stroke="#c3c8cf" stroke-width="1"/>',
    "destroying": '<path d="M0 4 H8" stroke="#c99516" stroke-width="1.5"/>',
}


def render_svg(gpus: Sequence[SliceMapGpu], *, caption: str = "") -> str:
    """Return an SVG document with one bar for each GPU and a legend of the states in it. It loads no other file."""
    states = [block.state for gpu in gpus for block in filled(gpu)] if gpus else []
    parts: list[str] = []
    top = float(_MARGIN)
    if caption:
        parts.append(_text(_MARGIN, top + 12, caption, size=15, weight=600))
        top += 28
    for gpu in gpus:
        parts += _gpu(gpu, top)
        top += _TITLE + (_BAR + _AXIS if gpu.memory_slices else 0) + _GAP
    parts += _legend(states, top)
    height = top + (_LEGEND if states else 0)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}"'
        f' viewBox="0 0 {_WIDTH} {height:g}" font-family="{escape(_FONT)}" font-size="12" role="img">'
    )
    return "\n".join(
        [
            head,
            f"<title>{escape(_printable(caption) or 'Map of GPU memory slices')}</title>",
            "<defs>",
            *(
                f'<pattern id="fill-{state}" width="8" height="8" patternUnits="userSpaceOnUse">{shape}</pattern>'
                for state, shape in _PATTERNS.items()
            ),
            "</defs>",
            f'<rect width="{_WIDTH}" height="{height:g}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _gpu(gpu: SliceMapGpu, top: float) -> list[str]:
    parts = [_text(_MARGIN, top + 14, gpu.title, size=13, weight=600)]
    if gpu.memory_slices < 1:
        return parts
    slice_width = (_WIDTH - 2 * _MARGIN) / gpu.memory_slices
    bar_top = top + _TITLE
    for block in filled(gpu):
        parts += _block(block, bar_top, slice_width)
    for number in range(gpu.memory_slices):
        left = _MARGIN + number * slice_width
        parts.append(_text(left + 2, bar_top + _BAR + 13, str(number), size=10, fill="#7a828c"))
    return parts


def _block(block: SliceMapBlock, top: float, slice_width: float) -> list[str]:
    left, width = _MARGIN + block.start * slice_width + 1, block.size * slice_width - 2
    _, ink = _COLORS.get(block.state, _UNKNOWN)
    parts = _box(block.state, left, top, width, _BAR)
    rows = (block.label, block.state, block.holder)
    for row, text in enumerate(text for text in rows if text):
        cut = _cut(text, width - 14)
        parts.append(_text(left + 8, top + 19 + 17 * row, cut, size=12, weight=400 if row else 600, fill=ink))
    hover = ", ".join(text for text in (block.label, block.state, block.holder) if text)
    return ["<g>", f"<title>{escape(_printable(hover))}</title>", *parts, "</g>"]


def _box(state: str, left: float, top: float, width: float, height: float) -> list[str]:
    paper, _ = _COLORS.get(state, _UNKNOWN)
    frame = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"'
    dashes = ' stroke="#c3c8ce" stroke-dasharray="4 3"' if state == FREE else ""
    parts = [f'<rect {frame} fill="{paper}"{dashes}/>']
    if state in _PATTERNS:
        parts.append(f'<rect {frame} fill="url(#fill-{state})" opacity="0.6"/>')
    return parts


def _legend(states: Iterable[str], top: float) -> list[str]:
    parts: list[str] = []
    left = float(_MARGIN)
    for state in (*(known for known in _COLORS if known in set(states)),):
        parts += [*_box(state, left, top, 16, 12), _text(left + 22, top + 10, state, size=11, fill="#4a5058")]
        left += 22 + len(state) * _LETTER + 18
    return parts


def _text(left: float, base: float, text: str, *, size: int, weight: int = 400, fill: str = "#1f2328") -> str:
    words = escape(_printable(text))
    return f'<text x="{left:.1f}" y="{base:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}">{words}</text>'


def _cut(text: str, width: float) -> str:
    most = max(1, int(width / _LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def _printable(text: str) -> str:
    """Return the text with its control characters made visible: XML allows none, not even escaped ones."""
    return visible(text)
