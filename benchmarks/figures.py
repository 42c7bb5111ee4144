"""One shape for every measured figure, so that a table in the docs, a gate in CI and the next version can be compared.

A benchmark measures, hands its figures here, and ends with `sys.exit(finish(...))`. This module knows nothing of what
is measured. The JSON: `{"figures": [{"name", "value", "unit", "goal", "better", "met", "n"}]}`, sorted by name.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TextIO


class Better(StrEnum):
    """Which direction is progress."""

    LOWER = "lower"
    HIGHER = "higher"


class FigureError(ValueError):
    """A figure that would mislead: not a number, without samples, or named twice."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `goal` None: recorded as a base line, not judged; `n`: how many samples it is made of."""

    name: str
    value: float
    unit: str
    better: Better
    n: int
    goal: float | None = None

    def __post_init__(self) -> None:
        if not self.name or any(c.isspace() for c in self.name):
            raise FigureError(f"figure {self.name!r}: give it a name without spaces, such as recovery_p95.worker_0")
        if not math.isfinite(self.value) or (self.goal is not None and not math.isfinite(self.goal)):
            raise FigureError(f"figure {self.name}: value {self.value} and goal {self.goal} must be finite")
        if self.n < 1:
            raise FigureError(f"figure {self.name}: {self.n} samples; a figure is made of at least one")

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better is Better.LOWER else self.value >= self.goal

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "better": self.better.value,
            "met": self.met,
            "n": self.n,
        }


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile (0..1) by nearest rank: always a value that was measured, so p95 of few samples is the worst."""
    if not samples or not 0 <= q <= 1:
        raise FigureError(f"quantile {q} of {len(samples)} samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def spread(
    name: str, samples: Sequence[float], unit: str, *, goal_p95: float | None = None, better: Better = Better.LOWER
) -> list[Figure]:
    """The usual four figures of a series: `name.p50`, `.p95` (the one with the goal), `.min` and `.max`."""
    n = len(samples)
    return [
        Figure(f"{name}.p50", quantile(samples, 0.5), unit, better, n),
        Figure(f"{name}.p95", quantile(samples, 0.95), unit, better, n, goal_p95),
        Figure(f"{name}.min", min(samples), unit, better, n),
        Figure(f"{name}.max", max(samples), unit, better, n),
    ]


def to_json(figures: Iterable[Figure]) -> str:
    """The document, sorted by name. Raises FigureError for a name given twice."""
    ordered = sorted(figures, key=lambda f: f.name)
    for a, b in pairwise(ordered):
        if a.name == b.name:
            raise FigureError(f"figure {a.name} was given twice")
    return json.dumps({"figures": [f.to_json() for f in ordered]}, indent=2) + "\n"


def table(figures: Iterable[Figure]) -> str:
    """The figures as a Markdown table, ready for the docs."""
    rows = [("figure", "value", "goal", "met", "n")]
    for f in sorted(figures, key=lambda f: f.name):
        sign = "≤" if f.better is Better.LOWER else "≥"
        goal = "–" if f.goal is None else f"{sign} {f.goal:.4g} {f.unit}"
        rows.append((f.name, f"{f.value:.4g} {f.unit}", goal, {None: "–", True: "yes", False: "NO"}[f.met], str(f.n)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with what every benchmark takes: `--quick` and `--json PATH`. A benchmark that has one and is
    ended, by `timeout` for example, ends what it has started, as after an error."""
    signal.signal(signal.SIGTERM, _leave)
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="few samples: shows that it works, proves no figure")
    p.add_argument("--json", type=Path, metavar="PATH", help="write the figures there; - for standard output")
    return p


def _leave(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once: what cleans up is not to be interrupted
    sys.exit(128 + number)


def finish(figures: Sequence[Figure], args: argparse.Namespace, out: TextIO | None = None) -> int:
    """Print the table, write the JSON, and return the exit status: 1 when a goal was missed in a full run.

    A quick run judges nothing, because a handful of samples cannot.
    """
    out = out or sys.stdout
    document = to_json(figures)
    if args.json == Path("-"):
        out.write(document)
    else:
        print(table(figures), file=out)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(document, encoding="utf-8")
    missed = [f.name for f in figures if f.met is False]
    if missed and args.quick:
        print(f"quick run, not judged: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed and not args.quick else 0
