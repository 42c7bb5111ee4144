"""Steps over time, one panel an arm, as an SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

WIDTH, PANEL, GAP, LEFT, RIGHT, TOP = 960, 56, 14, 190, 90, 44  # pixels
INK, PALE, CURVE, FAULT = "#22272e", "#d7dce2", "#2b7bba", "#c8352b"


@dataclass(frozen=True)
class Curve:
    steps: list[tuple[float, int]]  # seconds, the newest step then
    faults: list[float]  # seconds
    ended: bool


def draw(curves: Mapping[str, Curve], steps: int) -> str:
    """The whole document. All panels have one axis of time, so the eye compares their lengths."""
    longest = max(curve.steps[-1][0] for curve in curves.values())
    height = TOP + len(curves) * (PANEL + GAP) + 36
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">',
        f"<title>Steps over time, to step {steps}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600" fill="{INK}">'
        f"The same training and the same faults: steps over time, to step {steps}</text>",
    ]
    for i, (name, curve) in enumerate(curves.items()):
        rows += _panel(name, curve, TOP + i * (PANEL + GAP), longest, steps)
    rows += _axis(longest, height)
    return "\n".join([*rows, "</svg>\n"])


def _x(at: float, longest: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * at / longest, 1)


def _panel(name: str, curve: Curve, top: int, longest: float, steps: int) -> list[str]:
    bottom = top + PANEL
    path, height = "", float(bottom)
    for at, step in curve.steps:
        path += f" H{_x(at, longest)} V{round(bottom - PANEL * step / steps, 1)}"
        height = bottom - PANEL * step / steps
    end = _x(curve.steps[-1][0], longest)
    word = f"{curve.steps[-1][0]:.0f} s" if curve.ended else "did not end"
    return [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{PANEL}" fill="none" stroke="{PALE}"/>',
        f'<text x="16" y="{top + PANEL // 2 + 4}" fill="{INK}">{escape(name)}</text>',
        *(
            f'<line x1="{_x(at, longest)}" x2="{_x(at, longest)}" y1="{top}" y2="{bottom}" stroke="{FAULT}" '
            'stroke-dasharray="3 3"/>'
            for at in curve.faults
        ),
        f'<path d="M{LEFT} {bottom}{path}" fill="none" stroke="{CURVE}" stroke-width="2"/>',
        f'<text x="{end + 6}" y="{round(height + 4, 1)}" fill="{INK}">{word}</text>',
    ]


def _axis(longest: float, height: int) -> list[str]:
    apart = 10 ** math.floor(math.log10(max(longest, 1.0)))
    apart = apart / 2 if longest / apart < 4 else apart
    return [
        f'<text x="{_x(i * apart, longest)}" y="{height - 12}" text-anchor="middle" fill="{INK}">{i * apart:g} s</text>'
        for i in range(int(longest / apart) + 1)
    ]
