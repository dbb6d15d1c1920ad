"""Small charts as SVG data URIs: what a markdown artifact can show in Prefect's pages without a network.

Inline ``<svg>`` is stripped there and remote images are missing offline; an image whose address is the picture itself renders in both.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

__all__ = ["data_uri", "line_chart"]

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 36
_MAX_POINTS = 600

Point = tuple[int, float]


def line_chart(points: Sequence[tuple[int, float | None]], *, marks: Sequence[int] = (), label: str = "loss") -> str:
    """Draw values by step as an SVG document; ``marks`` are steps with a vertical line (where a generation began).

    Values that are None or not finite are left out. More than 600 points are averaged in equal groups.
    """
    finite = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    if not finite:
        return _document(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT / 2:.0f}" text-anchor="middle">no {label} yet</text>')
    shown = _thin(finite)
    low_x, high_x = finite[0][0], max(finite[-1][0], finite[0][0] + 1)
    low_y, high_y = _range([value for _, value in shown])

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (step - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high_y - value) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        return x, y

    parts = []
    for value in _ticks(low_y, high_y):
        _, y = place(low_x, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in _ticks(low_x, high_x):
        x, _ = place(step, low_y)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{step:g}</text>')
    for step in marks:
        if low_x <= step <= high_x:
            x, _ = place(step, low_y)
            parts.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#e07b39" stroke-dasharray="3 3"/>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(step, value) for step, value in shown))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2b6cb0" stroke-width="1.5"/>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">step</text>')
    parts.append(f'<text x="{_LEFT}" y="11">{label}</text>')
    return _document("".join(parts))


def data_uri(svg: str) -> str:
    """Return an address that is the picture itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _document(body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="#444"><rect width="100%" height="100%" fill="#fff"/>{body}</svg>'
    )


def _thin(points: Sequence[Point]) -> list[Point]:
    size = -(-len(points) // _MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _range(values: Sequence[float]) -> Point | tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) * 0.05 or max(abs(high) * 0.05, 1e-3)
    return low - pad, high + pad


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers in [low, high]: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [round(index * step, 10) for index in range(first, math.floor(high / step) + 1)]
