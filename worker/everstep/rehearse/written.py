"""Compares what a script has written into its folder, and what its rank 0 has printed, with the calm run's. Pure, but
for `read_files` and `read_printed`.

What differs between two calm runs is compared in no other: a file or a line as a whole; or, where lines differ in
numbers alone (a time, a rate), these numbers in each line of the same form.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.rehearse import pickled

TEXT_BYTES = 2**20  # of one file whose lines are compared
ALL_BYTES = 32 * 2**20  # of all such files of a run
WHOLE_BYTES = 256 * 2**20  # of one file that is read at once
MOST_NAMED = 4
MOST_CHARACTERS = 80  # of a line in a text for a person
COUNTS = ("step", "global_step", "iteration", "iter", "epoch")  # columns and keys that name a row
PRINTED = "printed-*.jsonl"
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# What Trainer prints at its end: seconds, and a mean loss of the steps since the last recovery.
_SUMMARY = "{'train_runtime'"


@dataclass(frozen=True)
class Written:
    """A file at the end of a run. `lines` are None if it is too large, or no text."""

    size: int
    digest: str
    lines: tuple[str, ...] | None = None
    loaded: bool = False  # the digest is of what `torch.load` reads: pickles of equal values may have other bytes


Printed = dict[int, list[str]]  # the number of a step → what rank 0 printed in it, and behind it


def read_files(folder: Path, names: Collection[str], run: Path) -> dict[str, Written]:
    """The files of these names below `folder`. `run`: the folder of the run, whose path is no difference."""
    found, left = {}, ALL_BYTES
    for name in sorted(names):
        path = folder / name
        size = path.stat().st_size
        if size > WHOLE_BYTES:
            with path.open("rb") as file:
                found[name] = Written(size, hashlib.file_digest(file, hashlib.blake2b).hexdigest())
            continue
        content = path.read_bytes()
        lines = None
        if size <= min(TEXT_BYTES, left) and b"\0" not in content:
            left -= size
            content = content.replace(str(run).encode(), b"")
            try:
                text = content.decode().removesuffix("\n")
                lines = tuple(map(as_shown, text.split("\n"))) if content else ()
            except UnicodeDecodeError:
                lines = None
        loaded = _digest_of_pickle(path, content) if lines is None else ""
        digest = loaded or hashlib.blake2b(content, digest_size=16).hexdigest()
        found[name] = Written(size, digest, lines, bool(loaded))
    return found


def as_shown(line: str) -> str:
    """A line as a terminal shows it in the end, without what a progress bar has written over."""
    line = next((part for part in reversed(line.split("\r")) if part), "")
    if "\b" not in line:
        return line
    shown: list[str] = []
    for letter in line:
        if letter != "\b":
            shown.append(letter)
        elif shown:
            shown.pop()
    return "".join(shown)


def _digest_of_pickle(path: Path, content: bytes) -> str:
    """Of the tensors and plain values that `torch.save` has written; "" for a file that cannot be read as such."""
    if not content.startswith((b"PK\x03\x04", b"\x80")):
        return ""
    torch = importlib.import_module("torch")  # takes seconds, so it is imported where there is such a file
    contents = importlib.import_module("everstep.train.guards.contents")
    try:
        with warnings.catch_warnings(action="ignore"):  # of other protocols of pickle
            return f"content {contents.digest_of(torch.load(path, map_location='cpu', weights_only=True))}"
    except Exception:  # another kind of file, or it has a class of the script's, such as its model
        digest = pickled.digest_of(content)
        return f"content {digest}" if digest else ""


def read_printed(folder: Path) -> Printed:
    """What rank 0 printed in each step, and behind it, when it was taken last."""
    newest: dict[int, tuple[float, list[str]]] = {}
    for path in sorted(folder.glob(PRINTED)):
        lines: list[str] = []
        before = 0  # lines of the step when its newest evaluation began
        for text in path.read_text().splitlines():
            try:
                one = json.loads(text)
            except ValueError:  # cut off
                continue
            if "text" in one:
                if not one["text"].startswith(_SUMMARY):
                    lines.append(one["text"])
                continue
            if "evaluates" in one:  # what a lost evaluation has printed comes again
                before = len(lines) if one["evaluates"] else before
                del lines[before:]
                continue
            lines, before = [], 0
            if one["at"] >= newest.get(one["step"], (0.0,))[0]:
                newest[one["step"]] = one["at"], lines
    return {step: lines for step, (_, lines) in newest.items()}


def differing_files(
    calm: Mapping[str, Written], again: Mapping[str, Written], here: Mapping[str, Written]
) -> dict[str, str]:
    """How files of a run are not those of two calm ones, as a sentence, by name."""
    alike = calm.keys() & again.keys()
    chance = {_NUMBER.sub("#", name) for name in calm.keys() ^ again.keys()}  # a time or a process in the name
    found = dict.fromkeys(sorted(alike - here.keys()), "is missing")
    for name in sorted(here.keys() - alike):
        if _NUMBER.sub("#", name) not in chance:
            found[name] = "is written in no calm run"
    for name in sorted(alike & here.keys()):
        a, b, c = calm[name], again[name], here[name]
        if a.lines is None or b.lines is None or c.lines is None:
            what = "content" if c.loaded else "bytes"
            text = f"has other {what}" if a.digest == b.digest != c.digest else ""
        else:
            text = _lines(a.lines, b.lines, c.lines)
        if text:
            found[name] = text
    return found


def differing_prints(
    calm: Printed, again: Printed, here: Printed, leave_out: Collection[int]
) -> tuple[int, str] | None:
    """The number of the first step for which rank 0 printed other lines, and a sentence. `leave_out`: steps in which
    rank 0 was killed. What was printed in a step that was taken again is not among the lines."""
    flat, other = ([line for _, lines in sorted(one.items()) for line in lines] for one in (calm, again))
    masks = _Masks(flat, other)
    for step in sorted(calm.keys() & again.keys() & here.keys() - set(leave_out)):
        a, b, c = ([masks.of(line) for line in one[step]] for one in (calm, again, here))
        if a == b != c:
            i = next((i for i, (x, y) in enumerate(zip(a, c, strict=False)) if x != y), min(len(a), len(c)))
            lines = _both(here[step], calm[step], i, masks)
            return step, f"in step {step} rank 0 printed {lines[0]}, and {lines[1]} in the calm run"
    return None


class _Masks:
    """Which numbers of a line differ between two calm runs, by the form of the line."""

    def __init__(self, calm: Sequence[str], again: Sequence[str]) -> None:
        self._places: dict[str, set[int]] = {}
        for a, b in zip(calm, again, strict=False) if Counter(calm) != Counter(again) else ():
            form = _NUMBER.sub("#", a)
            if form == _NUMBER.sub("#", b):
                pairs = enumerate(zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True))
                self._places.setdefault(form, set()).update(i for i, (x, y) in pairs if x != y)

    def of(self, line: str) -> str:
        places = self._places.get(_NUMBER.sub("#", line))
        if not places:
            return line
        numbers = iter(range(len(line)))
        return _NUMBER.sub(lambda found: "*" if next(numbers) in places else found[0], line)

    def differ_at(self, line: str, other: str) -> int:
        """The first character that differs in what counts; the end if none does."""
        places = self._places.get(form := _NUMBER.sub("#", line), set())
        if form == _NUMBER.sub("#", other):
            pairs = zip(_NUMBER.finditer(line), _NUMBER.finditer(other), strict=True)
            return next((a.start() for i, (a, b) in enumerate(pairs) if i not in places and a[0] != b[0]), len(line))
        return next((k for k, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), len(line))


def _lines(calm: Sequence[str], again: Sequence[str], here: Sequence[str]) -> str:
    """How the lines of a text are not those of two calm runs; "" if they are, or if the two differ."""
    masks = _Masks(calm, again)
    a, b, c = (list(map(masks.of, one)) for one in (calm, again, here))
    if Counter(a) != Counter(b) or Counter(a) == Counter(c):
        return ""  # the order of lines of several ranks is nobody's
    rows, mine = _rows(calm), _rows(here)
    if rows is not None and mine is not None and (text := _counted(Counter(rows), Counter(mine))):
        return f"has {text}"
    if not Counter(c) - Counter(dict.fromkeys(a, len(c))):  # no line that the calm run has not
        return f"has {_counted(Counter(map(_short, a)), Counter(map(_short, c)))}"
    i = next((i for i, (x, y) in enumerate(zip(a, c, strict=False)) if x != y), min(len(a), len(c)))
    lines = _both(here, calm, i, masks)
    return f"has other lines: line {i + 1} is {lines[0]}, and {lines[1]} in the calm run"


def _counted(calm: Counter[str], here: Counter[str]) -> str:
    """Rows that are there more or less often."""
    words = {0: "missing", 1: "once", 2: "twice"}
    found = [
        f"{row} {words.get(here[row], f'{here[row]} times')}"
        for row in {**calm, **here}
        if here[row] != calm[row]
    ]  # fmt: skip
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def _rows(lines: Sequence[str]) -> list[str] | None:
    """`step 14` for each row of a table or of lines of JSON that has such a column; None for another text."""
    if lines and lines[0].startswith("{"):
        return _rows_of_json(lines)
    head, *rest = list(csv.reader(lines)) or [[]]
    for name in COUNTS:
        if name in head and len(head) > 1:
            at = head.index(name)
            return ["the header", *("the header" if row == head else f"{name} {_at(row, at)}" for row in rest)]
    return None


def _rows_of_json(lines: Sequence[str]) -> list[str] | None:
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError:
        return None
    for name in COUNTS:
        if all(isinstance(row, dict) and name in row for row in rows):
            return [f"{name} {row[name]}" for row in rows]
    return None


def _at(row: Sequence[str], i: int) -> str:
    return row[i] if i < len(row) else "(cut off)"


def _both(here: Sequence[str], calm: Sequence[str], i: int, masks: _Masks) -> list[str]:
    """The i-th lines, or "nothing". Of long ones the part that differs in what counts."""
    pair = [one[i] if i < len(one) else None for one in (here, calm)]
    longest = max(len(line or "") for line in pair)
    if longest <= MOST_CHARACTERS or None in pair:
        return [_short(line) if line is not None else "nothing" for line in pair]
    same = masks.differ_at(pair[0] or "", pair[1] or "")
    first = min(max(0, same - MOST_CHARACTERS // 2), longest - MOST_CHARACTERS)
    return [_short(line or "", first) for line in pair]


def _short(line: str, first: int = 0) -> str:
    """From the character `first` on."""
    part = line[first : first + MOST_CHARACTERS]
    return repr(f"{'…' if first else ''}{part}{'…' if first + MOST_CHARACTERS < len(line) else ''}")
