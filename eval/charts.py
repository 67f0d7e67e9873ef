"""Line charts as inline SVG text: a few points with intervals, colours from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 14, 40


@dataclass(frozen=True)
class Point:
    """``low`` and ``high`` are None where no interval is known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def line_chart(title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """A chart as an ``<svg>`` element; each series has the class ``series-0``, ``series-1``, ...

    All text is escaped. Returns an empty text when no series has a point.
    """
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    xs = sorted({point.x for point in points})
    top = max(max(point.y, point.high or 0.0) for point in points)
    ticks = nice_ticks(top if top > 0 else 1.0)
    x_low, x_high = xs[0], xs[-1]
    plot_width, plot_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def px(x: float) -> float:
        share = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return _LEFT + (0.04 + 0.92 * share) * plot_width

    def py(y: float) -> float:
        return _TOP + plot_height * (1 - y / ticks[-1])

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for x in xs:
        parts.append(
            f'<text class="tick" x="{px(x):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        )
    middle = _LEFT + plot_width / 2
    parts.append(
        f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="label" transform="translate(12 {_TOP + plot_height / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    for number, (name, each) in enumerate(series.items()):
        parts.append(_series(number, name, each, px, py))
    return "".join([*parts, "</svg>"])


def _series(number: int, name: str, points: Sequence[Point], px, py) -> str:  # type: ignore[no-untyped-def]
    ordered = sorted(points, key=lambda point: point.x)
    path = " ".join(f"{px(point.x):.1f},{py(point.y):.1f}" for point in ordered)
    parts = [f'<g class="series series-{number % 6}"><polyline points="{path}"/>']
    for point in ordered:
        if point.low is not None and point.high is not None:
            x = f"{px(point.x):.1f}"
            parts.append(f'<line x1="{x}" x2="{x}" y1="{py(point.low):.1f}" y2="{py(point.high):.1f}"/>')
        label = f"{name}: {point.y:.4g} at {point.x:g}"
        parts.append(
            f'<circle cx="{px(point.x):.1f}" cy="{py(point.y):.1f}" r="3.5">'
            f"<title>{escape(label)}</title></circle>"
        )
    return "".join([*parts, "</g>"])


def nice_ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to the first one that is at least ``top``."""
    raw = top / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    return [round(i * step, 12) for i in range(math.ceil(top / step - 1e-9) + 1)]
