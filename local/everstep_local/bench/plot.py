"""The figures of `everstep bench` as an SVG: speed-up beside the ideal one, and the share of communication. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from everstep_local.bench.scaling import Row

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 76, 72  # of the plot
INK, PALE, GREY, BLUE, AMBER = "#22272e", "#d7dce2", "#8a929c", "#2b7bba", "#f2b134"
BAR = 22  # width of a bar


def draw(rows: Sequence[Row], title: str) -> str:
    """The whole document, text in UTF-8. `rows`: at least one, by size."""
    top = max(max(row.ideal, row.speedup) for row in rows) * 1.1
    least = rows[0].measured.workers
    span = max(rows[-1].measured.workers - least, 1)

    def x(index: int) -> float:
        return round(LEFT + 50 + (WIDTH - LEFT - RIGHT - 110) * (rows[index].measured.workers - least) / span, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(16, 26, title, size=16, weight="600"),
        *_legend(communicates=any(row.measured.communication is not None for row in rows)),
    ]
    for value in _ticks(top):
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="{PALE}"/>')
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:g}×", anchor="end"))
    for index, row in enumerate(rows):
        if (share := row.measured.communication) is not None:
            height = (HEIGHT - TOP - BOTTOM) * share
            bottom = HEIGHT - BOTTOM
            parts.append(
                f'<rect x="{x(index) - BAR / 2}" y="{bottom - height:.1f}" width="{BAR}" height="{height:.1f}" '
                f'fill="{AMBER}" fill-opacity="0.55"/>'
            )
    parts.append(_line([(x(i), y(row.ideal)) for i, row in enumerate(rows)], GREY, dashed=True, width=2))
    parts.append(_line([(x(i), y(row.speedup)) for i, row in enumerate(rows)], BLUE, width=2.5))
    for index, row in enumerate(rows):
        at = x(index)
        parts.append(f'<circle cx="{at}" cy="{y(row.speedup)}" r="4" fill="{BLUE}"/>')
        parts.append(_text(at, y(row.speedup) + 20, f"{row.speedup:.2f}×", anchor="middle", weight="600"))
        workers = row.measured.workers
        parts.append(_text(at, HEIGHT - BOTTOM + 20, f"{workers} worker{'s' if workers > 1 else ''}", anchor="middle"))
        share = row.measured.communication
        talks = "" if share is None else f", {share * 100:.0f} % comm."
        parts.append(_text(at, HEIGHT - BOTTOM + 37, f"{row.efficiency * 100:.0f} %{talks}", anchor="middle"))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _legend(*, communicates: bool) -> list[str]:
    entries = [
        f'<path d="M16 48h22" stroke="{BLUE}" stroke-width="2.5"/>', _text(44, 52, "speed-up (below: efficiency)"),
        f'<path d="M226 48h22" stroke="{GREY}" stroke-width="2" stroke-dasharray="5 4"/>', _text(254, 52, "ideal"),
    ]  # fmt: skip
    if communicates:
        entries.append(f'<rect x="312" y="41" width="14" height="14" fill="{AMBER}" fill-opacity="0.55"/>')
        entries.append(_text(332, 52, "share of a step that communicates (full height: 100 %)"))
    return entries


def _ticks(top: float) -> list[float]:
    step = next(s for s in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 1e9) if top / s <= 6)
    return [step * i for i in range(int(top / step) + 1)]


def _line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False, width: float) -> str:
    path = "L".join(f"{px} {py}" for px, py in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{INK}">'
        f"{escape(text)}</text>"
    )
