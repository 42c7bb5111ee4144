"""The report of a rehearsal as one page of HTML, which loads nothing and runs nothing. Pure.

Each text in it may be the script's: all of them are escaped, and the page forbids scripts and requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from everstep.rehearse.findings import Finding, Kind
from everstep.rehearse.play import Played
from everstep.rehearse.timeline import Event, Timeline

WIDTH, LANE, LEFT, TOP = 720, 26, 52, 8  # of a drawing, in its own units
AXIS, COMMITS = 22, 16

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --faint: #5b6470; --line: #d5dae0; --card: #f5f7f9;
  --good: #1a7f37; --warn: #8a5a00; --bad: #b3261e; --step: #3b6fb6; --commit: #7a3fa0 }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ed; --faint: #a2abb6; --line: #363d46;
  --card: #1d2228; --good: #56c271; --warn: #e0ac4a; --bad: #ff8a80; --step: #7fb0f2; --commit: #cb9bea } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; margin: 0 0 .25rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
header p { margin: .25rem 0; color: var(--faint) }
.verdict { font-weight: 600 } .good { color: var(--good) } .warn { color: var(--warn) } .bad { color: var(--bad) }
article, details { background: var(--card); border: 1px solid var(--line); border-left-width: 4px; border-radius: 4px;
  margin: .5rem 0; padding: .5rem .75rem }
article.bad { border-left-color: var(--bad) } article.warn { border-left-color: var(--warn) }
article h3 { font-size: 1rem; margin: 0 } article p { margin: .25rem 0; color: var(--ink) }
article p.small { color: var(--faint) } details details { border: 0; padding: 0 }
.small { color: var(--faint); font-size: .875rem }
summary { cursor: pointer } summary:focus-visible { outline: 2px solid var(--step); outline-offset: 4px }
code { font: .9em ui-monospace, monospace }
.wide { overflow-x: auto } svg { display: block; width: 100%; min-width: 34rem; height: auto; margin: .5rem 0 }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif } .lane { stroke: var(--line) }
.step { stroke: var(--step) } .start { fill: var(--good) } .kill { stroke: var(--bad); stroke-width: 2.5 }
.commit { fill: var(--commit) }
table { border-collapse: collapse; width: 100%; min-width: 30rem; font-size: .9375rem; overflow-wrap: normal }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--faint); font-weight: 500 } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
"""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
"""
_LEGEND = (
    "Each lane is a rank, from the first step on, in seconds since the run's start. A blue line: a step is complete. A "
    "green triangle: the first step of a process. A red cross: a process is killed. A violet diamond: a commit."
)
_WIDE = '<div class="wide" tabindex="0" role="group" aria-label="{}">{}</div>\n'


def page(command: str, runs: list[Played], found: list[Finding], seconds: float, results: list[str], note: str) -> str:
    """`command`: the script and its arguments. `results`: a word for each run. `note`: what was not compared, or ""."""
    certain = sum(one.certain for one in found)
    kind = "bad" if certain else "warn" if found else "good"
    verdict = f"{certain} found, {len(found) - certain} warnings" if found else "Nothing found"
    ranks = runs[0].scenario.sizes[0]
    return "".join(
        [
            _HEAD.format(title=escape(f"Rehearsal of {command}"), style=_STYLE),
            f"<header><h1>Rehearsal of <code>{escape(command)}</code></h1>",
            f'<p class="verdict {kind}">{verdict}</p>',
            f"<p>{len(runs)} runs of {ranks} ranks and {runs[0].last} steps, in {seconds:.0f} s</p>",
            f"<p>Not compared: {escape(note)}</p>" if note else "",
            "</header>\n<main>\n",
            "<h2>Findings</h2>\n" if found else "",
            *map(_finding, found),
            f'<h2>Runs</h2>\n<p class="small">{_LEGEND}</p>\n',
            *(_run(run, result, is_open=run is runs[0] or result != "as calm")
              for run, result in zip(runs, results, strict=True)),
            "<h2>Table of the runs</h2>\n",
            _table(runs, results),
            "</main>\n</body>\n</html>\n",
        ]
    )  # fmt: skip


def _finding(one: Finding) -> str:
    step = f", from step {one.step} on" if one.step is not None else ""
    names = ", ".join(f"<code>{escape(name)}</code>" for name in one.names)
    return (
        f'<article class="{"bad" if one.certain else "warn"}"><h3>{_word(one)}: '
        f"{escape(one.kind)}{step}</h3>\n<p>{escape(one.text)}</p>\n"
        + (f'<p class="small">It is about {names}</p>\n' if names else "")
        + f'<p class="small">In: {escape("; ".join(one.scenarios))}</p></article>\n'
    )


def _word(one: Finding) -> str:
    return "Found" if one.certain else "Not judged" if one.kind is Kind.SLOW else "Warning"


def _run(run: Played, result: str, *, is_open: bool) -> str:
    when = run.timeline
    title = f"{run.scenario.title}: {result}" if result != "–" else run.scenario.title
    lists = "".join(
        f"<li>{event.at:.1f} s: {escape(event.text)}</li>"
        for event in sorted((*when.starts, *when.kills, *when.commits), key=lambda event: event.at)
    )
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>\n"
        + _WIDE.format("Timeline", _drawing(run.scenario.title, when))
        + f'<details><summary class="small">The same as a list</summary><ul class="small">{lists}</ul></details>'
        "</details>\n"
    )


def _drawing(title: str, when: Timeline) -> str:
    times = [event.at for event in (*when.steps, *when.starts, *when.kills, *when.commits)] or [0.0]
    first, last = min(times), max(*times, min(times) + 0.1)  # imports may take most of a run, and are not drawn
    end = TOP + COMMITS + when.ranks * LANE

    def x(event: Event) -> float:
        return round(LEFT + 8 + (WIDTH - LEFT - 28) * (event.at - first) / (last - first), 1)

    def y(event: Event) -> float:
        return TOP + COMMITS + (event.rank or 0) * LANE + LANE / 2

    parts = [
        f'<text x="0" y="{TOP + COMMITS + (i + 0.5) * LANE + 4}">rank {i}</text><path class="lane" '
        f'd="M{LEFT} {TOP + COMMITS + (i + 0.5) * LANE}H{WIDTH - 12}"/>'
        for i in range(when.ranks)
    ]
    parts += _marks(when.steps, lambda e: f'<path class="step" d="M{x(e)} {y(e) - 7}v14"/>')
    parts += _marks(when.starts, lambda e: f'<path class="start" d="M{x(e)} {y(e) + 2}l-4.5 9h9z"/>')
    parts += _marks(when.kills, lambda e: f'<path class="kill" d="M{x(e) - 5} {y(e) - 5}l10 10m0 -10l-10 10"/>')
    parts += _marks(when.commits, lambda e: f'<path class="commit" d="M{x(e)} {TOP}l5 5l-5 5l-5 -5z"/>')
    for i in range(5):
        place, anchor = LEFT + 8 + (WIDTH - LEFT - 28) * i / 4, "end" if i == 4 else "middle"
        words = f"{first + (last - first) * i / 4:.1f} s"
        parts.append(f'<text x="{place:.0f}" y="{end + AXIS - 6}" text-anchor="{anchor}">{words}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {end + AXIS}" role="img"><title>{escape(title)}</title>' + "".join(parts) + "</svg>"
    )


def _marks(events: Iterable[Event], draw: object) -> list[str]:
    assert callable(draw)
    return [f"<g><title>{event.at:.1f} s: {escape(event.text)}</title>{draw(event)}</g>" for event in events]


def _table(runs: list[Played], results: list[str]) -> str:
    rows = "".join(
        f'<tr><td>{escape(run.scenario.title)}</td><td class="n">{run.last}</td><td class="n">{run.killed}</td>'
        f'<td class="n">{run.seconds:.1f}</td><td>{escape(result)}</td></tr>\n'
        for run, result in zip(runs, results, strict=True)
    )
    head = "".join(f'<th class="n">{name}</th>' for name in ("Steps", "Killed", "Seconds"))
    return _WIDE.format("Table", f"<table><tr><th>Run</th>{head}<th>Result</th></tr>\n{rows}</table>")
