"""Draws a timeline as an SVG for any browser, and as text for a terminal. Pure.

Time goes from left to right, in seconds. Each worker has a lane. Marks show actions of a person and faults, bands show
when the world stood still, and below are the world size and the loss. The colours are distinct for red-green
colour-blind people too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from everstep.jobs.timeline import Segment, State, Timeline

WIDTH, LEFT, RIGHT = 960, 104, 24  # pixels
LANE, GAP, PLOT = 26, 8, 96
COLOURS = {State.STARTING: "#f2b134", State.TRAINING: "#2b7bba"}
FAULT, BAND, INK, PALE, PAPER = "#c8352b", "#f6dcd9", "#22272e", "#d7dce2", "#ffffff"
# A page that has the drawing in it may give these classes other colours, for a dark screen.
CLASSES = {
    COLOURS[State.STARTING]: "starting", COLOURS[State.TRAINING]: "training", FAULT: "fault", BAND: "band",
    INK: "ink", PALE: "pale", PAPER: "paper",
}  # fmt: skip
# Distances of ticks, in seconds; beyond the last one, days.
TICKS = (0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200)
LETTER = 7  # pixels, about as wide as one of a label
ROW, ROWS = 13, 6  # the height of a row of labels in pixels, and how many there are
MAX_POINTS = 600  # of the loss curve: more than its pixels
BAR = {State.STARTING: "░", State.TRAINING: "█"}


def draw(timeline: Timeline, title: str) -> str:
    """The whole document, text in UTF-8."""
    return _Drawing(timeline).document(title)


class _Drawing:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.begin = timeline.begin
        self.seconds = max(timeline.seconds - timeline.begin, 1.0)  # that are drawn
        self.lanes = list(timeline.lanes)
        self.top = 92
        self.bottom = self.top + len(self.lanes) * (LANE + GAP)

    def x(self, at: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(max((at - self.begin) / self.seconds, 0.0), 1.0), 1)

    def document(self, title: str) -> str:
        world_top = self.bottom + 26
        loss_top = world_top + PLOT // 2 + 30
        height = loss_top + PLOT + 44
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" '
            'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">',
            f"<title>{_escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" {_fill(PAPER)}/>',
            _text(16, 26, title, size=16, weight="600"),
            *self._legend(),
            *self._bands(loss_top + PLOT),
            *self._rows(),
            *self._world(world_top),
            *self._loss(loss_top),
            *self._faults(loss_top + PLOT),
            *self._axis(loss_top + PLOT),
            "</svg>\n",
        ]
        return "\n".join(parts)

    def _legend(self) -> Iterable[str]:
        at = 16
        for colour, text in (
            (COLOURS[State.STARTING], "starting"),
            (COLOURS[State.TRAINING], "training"),
            (BAND, "no step is taken"),
            (FAULT, "what was done, and pods that died"),
        ):
            yield f'<rect x="{at}" y="38" width="12" height="12" {_fill(colour)}/>'
            yield _text(at + 17, 48, text)
            at += 34 + 7 * len(text)

    def _bands(self, bottom: int) -> Iterable[str]:
        ends: list[float] = []  # of the last label in each row, from below
        for span in self.timeline.spans:
            begin, end = self.x(span.begin), self.x(span.end)
            width = max(end - begin, 1.0)
            height = bottom - self.top + 4
            yield f'<rect x="{begin}" y="{self.top - 4}" width="{width:.1f}" height="{height}" {_fill(BAND)}/>'
            label = f"{span.reason} {span.end - span.begin:.1f} s"
            half = LETTER * len(label) / 2
            middle = min(max(begin + width / 2, LEFT + half), WIDTH - RIGHT - half)
            row = next((n for n, last in enumerate(ends) if last <= middle - half), len(ends))
            ends[row : row + 1] = [middle + half]
            yield _text(middle, bottom - 6 - ROW * (row % ROWS), label, anchor="middle", colour=FAULT)

    def _rows(self) -> Iterable[str]:
        for row, worker in enumerate(self.lanes):
            top = self.top + row * (LANE + GAP)
            yield _text(16, top + LANE / 2 + 4, f"worker {worker}")
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top + LANE}" y2="{top + LANE}" {_stroke(PALE)}/>'
            segments = self.timeline.lanes[worker]
            for segment in segments:
                yield self._bar(segment, top)
            for segment in segments:
                if segment.ended in ("Failed", "Deleted"):
                    yield self._cross(segment, top + LANE / 2)

    def _bar(self, segment: Segment, top: float) -> str:
        begin, end = self.x(segment.begin), self.x(segment.end)
        tip = f"{segment.pod}: {segment.state} {segment.begin:.2f} s to {segment.end:.2f} s {segment.ended}".strip()
        return (
            f'<rect x="{begin}" y="{top + 2}" width="{max(end - begin, 1):.1f}" height="{LANE - 4}" rx="2" '
            f"{_fill(COLOURS[segment.state])}><title>{_escape(tip)}</title></rect>"
        )

    def _cross(self, segment: Segment, y: float) -> str:
        x = self.x(segment.end)
        return f'<path d="M{x - 5} {y - 5} l10 10 m0 -10 l-10 10" {_stroke(FAULT)} stroke-width="2.5" fill="none"/>'

    def _faults(self, bottom: int) -> Iterable[str]:
        for number, action in enumerate(self.timeline.actions):
            at = self.x(action.at)
            y = self.top - 10 - 13 * (number % 2)
            anchor = "end" if at > WIDTH * 0.7 else "start"
            yield f'<line x1="{at}" x2="{at}" y1="{y + 3}" y2="{bottom}" {_stroke(FAULT)} stroke-dasharray="3 3"/>'
            yield _text(at, y, action.text, anchor=anchor, colour=FAULT, weight="600")

    def _world(self, top: int) -> Iterable[str]:
        height = PLOT // 2
        yield _text(16, top + height / 2 + 4, "world size")
        most = max((size for _, size in self.timeline.world), default=1) or 1
        corners: list[tuple[float, float]] = []
        for at, size in self.timeline.world:
            y = top + height - height * size / most
            if corners:
                corners.append((self.x(at), corners[-1][1]))
            corners.append((self.x(at), y))
            yield _text(self.x(at) + 3, y - 3, str(size))
        if corners:
            corners.append((self.x(self.begin + self.seconds), corners[-1][1]))
            yield _line(corners, COLOURS[State.TRAINING])
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top + height}" y2="{top + height}" {_stroke(PALE)}/>'

    def _loss(self, top: int) -> Iterable[str]:
        yield _text(16, top + PLOT / 2 - 4, "loss")
        yield _text(16, top + PLOT / 2 + 11, "(log scale)", size=10)
        points = [(at, loss) for at, _, loss in self.timeline.loss if loss > 0]
        if points:
            points = points[:: max(1, math.ceil(len(points) / MAX_POINTS))]
            logs = [math.log10(loss) for _, loss in points]
            low, high = min(logs), max(logs)
            span = (high - low) or 1.0
            # A line through a time without steps would show a loss that was never measured.
            breaks = [s.end for s in self.timeline.spans]
            parts = groupby(points, key=lambda p: sum(p[0] >= end for end in breaks))
            for _, part in parts:
                yield _line([(self.x(at), top + PLOT - PLOT * (math.log10(v) - low) / span) for at, v in part], INK)
            yield _text(LEFT - 6, top + 10, f"{10**high:.3g}", anchor="end", size=10)
            yield _text(LEFT - 6, top + PLOT, f"{10**low:.3g}", anchor="end", size=10)
        else:
            missing = "no loss is above 0" if self.timeline.loss else "nothing logs a loss"
            yield _text(LEFT + 6, top + 10, missing, size=10)

    def _axis(self, bottom: int) -> Iterable[str]:
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" {_stroke(INK)}/>'
        step = _tick(self.seconds)
        for number in range(math.ceil(self.begin / step), int((self.begin + self.seconds) // step) + 1):
            at = number * step
            yield f'<line x1="{self.x(at)}" x2="{self.x(at)}" y1="{bottom}" y2="{bottom + 5}" {_stroke(INK)}/>'
            yield _text(self.x(at), bottom + 18, duration(at), anchor="middle")
        for at, _ in self.timeline.commits:
            yield f'<circle cx="{self.x(at)}" cy="{bottom}" r="2.5" {_fill(INK)}/>'
        yield _text(LEFT, bottom + 36, "● a commit", size=10)


def text(timeline: Timeline, width: int = 72) -> str:
    """The lanes as lines of `width` cells: ░ starting, █ training, ✗ a pod died; what was done below."""
    begin, seconds = timeline.begin, max(timeline.seconds - timeline.begin, 0.001)
    lines = []
    for worker, segments in timeline.lanes.items():
        cells = [" "] * width
        for segment in segments:
            first, last = (min(width - 1, int((t - begin) / seconds * width)) for t in (segment.begin, segment.end))
            cells[first : last + 1] = BAR[segment.state] * (last + 1 - first)
        for segment in segments:
            if segment.ended in ("Failed", "Deleted"):
                cells[min(width - 1, int((segment.end - begin) / seconds * width))] = "✗"
        lines.append(f"worker {worker:<3}{''.join(cells).rstrip()}")
    start = f"{begin:.0f} s"
    lines.append(f"{'':10}{start}{f'{timeline.seconds:.1f} s':>{width - len(start)}}")
    done = [(a.at, a.text) for a in timeline.actions]
    done += [(s.begin, f"{s.reason}: no step for {s.end - s.begin:.1f} s") for s in timeline.spans]
    lines += [f"{at:8.1f} s  {what}" for at, what in sorted(done)]
    return "\n".join(lines)


def _escape(value: str) -> str:
    """The text as XML accepts it: a message may contain control characters, which no escape makes legal."""
    return escape("".join(c if c.isprintable() else " " for c in value))


def _tick(seconds: float) -> float:
    """The distance of about eight ticks, in seconds."""
    rough = seconds / 8
    return next((tick for tick in TICKS if tick >= rough), math.ceil(rough / 86_400) * 86_400)


def duration(seconds: float) -> str:
    """`1.5 s`, `90 s`, `15 min`, `3 h`, `2 d`: in the largest unit of which it is a whole number."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _fill(colour: str) -> str:
    return f'fill="{colour}" class="fill-{CLASSES[colour]}"'


def _stroke(colour: str) -> str:
    return f'stroke="{colour}" class="stroke-{CLASSES[colour]}"'


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" {_stroke(colour)} stroke-width="1.5"/>'


def _text(
    x: float, y: float, value: str, *, anchor: str = "start", colour: str = INK, size: int = 12, weight: str = "400"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {_fill(colour)} font-size="{size}" font-weight="{weight}">'
        f"{_escape(value)}</text>"
    )
