"""Line charts as SVG: no library, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 230, 48, 52
_COLOURS = ("#4e79a7", "#f28e2b", "#b07aa1", "#76b7b2", "#9c755f", "#edc948", "#59a14f", "#bab0ac")
_STRONG = "#c8102e"
_FONT = 'font-family="sans-serif" font-size="12"'
_LABEL_GAP = 15.0
_STEPS = (1, 2, 5, 10, 20)
_MOST_LINES = 7


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its points as (x, y) by rising x."""

    name: str
    points: tuple[tuple[float, float], ...]
    strong: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    """Converts values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Return a chart of the lines with their names beside their ends."""
    xs = sorted({x for each in series for x, _ in each.points})
    ys = [y for each in series for _, y in each.points]
    step = next((step for step in _STEPS if (max(ys) - min(ys)) / step < _MOST_LINES), _STEPS[-1])
    x = _Scale(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT)
    y = _Scale(math.floor(min(ys) / step) * step, math.ceil(max(ys) / step) * step, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_FONT}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold" fill="#222222">{escape(title)}</text>',
        *_grid(x, y, xs, step),
        f'<text x="{_LEFT}" y="{_HEIGHT - 14}" fill="#444444">{escape(x_label)}</text>',
        f'<text x="{_LEFT - 8}" y="{_TOP - 8}" text-anchor="end" fill="#444444">{escape(y_label)}</text>',
    ]
    colours = iter(_COLOURS * (1 + len(series) // len(_COLOURS)))
    coloured = [(each, _STRONG if each.strong else next(colours)) for each in series]
    labels = _spread([(y(each.points[-1][1]), each.name, colour) for each, colour in coloured])
    # The strong line is drawn last, on top of the others.
    for each, colour in sorted(coloured, key=lambda pair: pair[0].strong):
        parts += _line(each, colour, x, y)
    for height, name, colour in labels:
        parts.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{height + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join((*parts, "</svg>", ""))


def _grid(x: _Scale, y: _Scale, xs: Sequence[float], step: float) -> list[str]:
    parts = []
    value = y.low
    while value <= y.high:
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e4e4e4"/>',
            f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#444444">{value:g}</text>',
        ]
        value += step
    parts += [
        f'<text x="{x(value):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="#444444">{value:g}</text>'
        for value in xs
    ]
    return parts


def _line(series: Series, colour: str, x: _Scale, y: _Scale) -> list[str]:
    points = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in series.points)
    dash = ' stroke-dasharray="6 4"' if series.dashed else ""
    width = 3 if series.strong else 1.6
    dots = [
        f'<circle cx="{x(px):.1f}" cy="{y(py):.1f}" r="{width + 0.6:g}" fill="{colour}"/>' for px, py in series.points
    ]
    return [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dash}/>', *dots]


def _spread(labels: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Return the labels from top to bottom, moved apart where they would overlap, and kept inside the chart."""
    placed: list[tuple[float, str, str]] = []
    for height, name, colour in sorted(labels):
        above = placed[-1][0] + _LABEL_GAP if placed else -math.inf
        placed.append((max(height, above), name, colour))
    too_low = max(0.0, placed[-1][0] - (_HEIGHT - _BOTTOM)) if placed else 0.0
    return [(height - too_low, name, colour) for height, name, colour in placed]
