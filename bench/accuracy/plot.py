"""Line and dot plots as SVG, in the reader's light or dark colours. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_COLOURS = (("#0969da", "#58a6ff"), ("#bc4c00", "#f0883e"), ("#1a7f37", "#3fb950"),
            ("#8250df", "#bc8cff"), ("#cf222e", "#ff7b72"), ("#9a6700", "#d29922"))
_LEFT, _TOP, _WIDTH, _HEIGHT, _RIGHT = 64, 54, 430, 250, 190


class Series(NamedTuple):
    """A curve, or dots where `dots`."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


class Band(NamedTuple):
    """A range of y that is named."""

    name: str
    low: float
    high: float


def _style() -> str:
    light, dark = [], []
    for index, (day, night) in enumerate(_COLOURS):
        light.append(f".f{index}{{fill:{day}}}.l{index}{{stroke:{day}}}")
        dark.append(f".f{index}{{fill:{night}}}.l{index}{{stroke:{night}}}")
    return ("text{font:12px system-ui,sans-serif;fill:#1f2328}.muted{fill:#656d76}"
            ".paper{fill:#fff}.grid{stroke:#d8dee4}.band{fill:#1a7f37;fill-opacity:.14}"
            "polyline{fill:none;stroke-width:2}" + "".join(light)
            + "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.muted{fill:#8d96a0}"
            ".paper{fill:#0d1117}.grid{stroke:#30363d}" + "".join(dark) + "}")


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        step = max(1, (last - first) // 7)
        return [2.0**e for e in range(first, last + 1, step) if low <= 2.0**e <= high]
    unit = 10 ** math.floor(math.log10(high))
    step = next(s * unit for s in (0.1, 0.2, 0.5, 1.0, 2.0) if high / (s * unit) <= 7)
    return [step * i for i in range(int(high / step + 1e-9) + 1)]


def plot(title: str, x_name: str, y_name: str, series: Sequence[Series], *, log_x: bool = False,
         bands: Sequence[Band] = ()) -> str:
    """y starts at 0."""
    xs = [x for s in series for x, _ in s.points]
    top = 1.08 * max([y for s in series for _, y in s.points] + [b.high for b in bands])
    low, high = (min(xs), max(xs)) if log_x else (0.0, max(xs))

    def at_x(x: float) -> float:
        part = math.log(x / low) / math.log(high / low) if log_x else (x - low) / (high - low)
        return _LEFT + _WIDTH * part

    def at_y(y: float) -> float:
        return _TOP + _HEIGHT * (1 - y / top)

    total = _LEFT + _WIDTH + _RIGHT
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {_TOP + _HEIGHT + 52}" '
           f'role="img"><style>{_style()}</style>',
           '<rect class="paper" width="100%" height="100%"/>',
           f'<text x="14" y="24" style="font-size:15px">{escape(title)}</text>',
           f'<text class="muted" x="14" y="44">{escape(y_name)}</text>']
    for band in bands:
        out.append(f'<rect class="band" x="{_LEFT}" y="{at_y(band.high):.1f}" width="{_WIDTH}" '
                   f'height="{at_y(band.low) - at_y(band.high):.1f}"/>')
        out.append(f'<text class="muted" x="{_LEFT + _WIDTH + 8}" '
                   f'y="{at_y((band.low + band.high) / 2) + 4:.1f}">{escape(band.name)}</text>')
    for tick in _ticks(0, top, False):
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at_y(tick):.1f}" '
                   f'y2="{at_y(tick):.1f}"/><text class="muted" x="{_LEFT - 8}" '
                   f'y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    for tick in _ticks(low, high, log_x):
        out.append(f'<text class="muted" x="{at_x(tick):.1f}" y="{_TOP + _HEIGHT + 18}" '
                   f'text-anchor="middle">{tick:.4g}</text>')
    out.append(f'<text class="muted" x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 40}" '
               f'text-anchor="middle">{escape(x_name)}</text>')
    for index, one in enumerate(series):
        colour = index % len(_COLOURS)
        places = [(at_x(x), at_y(y)) for x, y in one.points]
        if not one.dots:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            out.append(f'<polyline class="l{colour}" points="{points}"/>')
        out += [f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        y = _TOP + 14 + 18 * index
        out.append(f'<circle class="f{colour}" cx="{_LEFT + _WIDTH + 14}" cy="{y - 4}" r="4"/>'
                   f'<text x="{_LEFT + _WIDTH + 24}" y="{y}">{escape(one.name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
