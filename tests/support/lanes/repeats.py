"""A lane of tests, and each of its failures once more, alone: without parallel load, in a process of its own.

One failure in thousands of tests on a busy machine must not stop a change, and must not be forgotten either.
Invariants: a lane passes only if every collected test ended and every failure passed alone; what was repeated is told.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.lanes import left_out

RECORDER = Path(__file__).with_name("recorder.py")
END_LIMIT = 60.0  # seconds for pytest to stop its servers after it was told to end
MOST = 5  # failures of different causes that are repeated, in all lanes together; more of them are no accident
WHOLE_MOST = 50  # in each lane of a night, whose list of failures is what people want from it
SHOWN = 5  # names of tests in a message


@dataclass(frozen=True, slots=True)
class Failure:
    """Tests that failed of one cause; more than one only where a fixture that they share failed."""

    tests: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """`again` is why it failed alone too, or "" if it passed."""

    lane: str
    failure: Failure
    again: str

    def lines(self) -> list[str]:
        name = self.failure.tests[0]
        others = f" and {len(self.failure.tests) - 1} more with it" if len(self.failure.tests) > 1 else ""
        told = [
            f"{'FAILED TWICE' if self.again else 'passed alone'}  {name}{others}  (lane {self.lane})",
            f"    first: {self.failure.why}",
        ]
        return [*told, f"    alone: {self.again}"] if self.again else told


@dataclass(frozen=True, slots=True)
class Outcome:
    """`problem` is why the lane failed, or "" if it passed."""

    problem: str
    record: Record
    repeated: tuple[Repeated, ...] = ()


@dataclass(slots=True)
class Record:
    """What `recorder.py` wrote of one run of pytest; `code` is its exit status, negative for a signal."""

    code: int
    collected: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)  # test → cause, first line
    broken: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # test → set-up, call and tear-down

    @property
    def good(self) -> set[str]:
        """Tests that came to their end, passed or skipped."""
        return self.ended - set(self.failed)

    def add_earlier(self, earlier: Record) -> None:
        """What an earlier run on the same commit passed, and this one therefore did not play."""
        good = earlier.good
        self.collected |= good
        self.ended |= good
        self.passed |= earlier.passed & good
        self.seconds |= {test: earlier.seconds[test] for test in good}

    @classmethod
    def read(cls, path: Path, code: int) -> Record:
        record = cls(code)
        for text in path.read_text().splitlines() if path.exists() else []:
            line = json.loads(text)
            record.collected.update(line.get("collected", ()))
            record.broken += [line["broken"]] if "broken" in line else []
            test = line.get("test")
            if test is None:
                continue
            record.seconds[test] = record.seconds.get(test, 0.0) + line["seconds"]
            if line["outcome"] == "failed":
                record.failed.setdefault(test, (line["cause"], line["why"]))
            if line["outcome"] == "passed" and line["when"] == "call":
                record.passed.add(test)
            if line["when"] not in ("setup", "call") or line["outcome"] == "failed":
                record.ended.add(test)
        return record

    def failures(self) -> list[Failure]:
        by_cause: dict[str, list[str]] = {}
        for test, (cause, _) in self.failed.items():
            by_cause.setdefault(cause, []).append(test)
        return [Failure(tuple(tests), self.failed[tests[0]][1]) for tests in by_cause.values()]


def run(arguments: Sequence[str], record: Path, most: int, limit: float) -> Record:
    """One run of pytest, whose output goes where ours goes; ended after `limit` seconds."""
    record.unlink(missing_ok=True)
    argv = [sys.executable, str(RECORDER), str(record), str(most), *arguments]
    with subprocess.Popen(argv) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = _end(process)
            read = Record.read(record, code)
            read.broken.append(f"it ran longer than {limit:.0f} s")
            return read
        except KeyboardInterrupt:
            _end(process)
            raise
    return Record.read(record, code)


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(END_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def judge(record: Record, most: int, before: int = 0) -> str:
    """Why no repetition can make this run good; "" if it is good or may become so. `before`: failures of the lanes
    before, which count too."""
    left = sorted(record.collected - record.ended)
    failures = record.failures()
    if record.broken:
        return "; ".join(record.broken)
    if before + len(failures) > most:
        return f"more than {most} failures of different causes; none is repeated, {len(left)} tests did not run"
    if record.code not in (0, 1):
        return f"pytest ended with {record.code}, {len(left)} tests did not run"
    if left or not record.collected:
        return f"{len(left)} tests did not run: {', '.join(left[:SHOWN])}" if left else "there was no test"
    if (record.code == 0) == bool(failures):
        return f"pytest ended with {record.code}, and {len(failures)} tests failed"
    return ""


def play(
    lane: str,
    chosen: Sequence[str],
    parallel: Sequence[str],
    folder: Path,
    *,
    most: int = MOST,
    before: int = 0,
    limit: float = 3600.0,
    earlier: Record | None = None,
) -> Outcome:
    """Run pytest with the arguments `chosen` and `parallel`, then its failures alone, without `parallel`.

    Records go to `folder`. `most`: failures of the whole run, of which the lanes before had `before`. `limit` is in
    seconds, for the lane and for each repetition. What `earlier` passed is not played again, and counts as passed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out: list[str] = []
    if earlier is not None:
        out = left_out.write(earlier.good, folder / f"{lane}.left-out")
        if earlier.collected and earlier.collected <= earlier.good:
            return Outcome("", earlier)
    record = run([*chosen, *parallel, *out], folder / f"{lane}.jsonl", max(0, most - before), limit)
    if earlier is not None:
        record.add_earlier(earlier)
    problem = judge(record, most, before)
    if problem:
        return Outcome(f"lane {lane}: {problem}", record)
    repeated = []
    for number, failure in enumerate(record.failures(), 1):
        print(f"\n##### repeated alone: {failure.tests[0]}\n##### first: {failure.why}", flush=True)
        again = run(failure.tests, folder / f"{lane}-repeat-{number}.jsonl", len(failure.tests), limit)
        repeated.append(Repeated(lane, failure, _twice(failure, again)))
    bad = sorted(one.failure.tests[0] for one in repeated if one.again)
    return Outcome(f"lane {lane}: failed twice: {', '.join(bad)}" if bad else "", record, tuple(repeated))


def _twice(failure: Failure, again: Record) -> str:
    """Why the repetition failed; "" if all of its tests passed."""
    if again.failed:
        return next(iter(again.failed.values()))[1]
    if again.broken:
        return "; ".join(again.broken)
    missing = [test for test in failure.tests if test not in again.passed]
    if again.code != 0 or missing:
        return f"pytest ended with {again.code}; not passed: {', '.join(missing[:SHOWN])}"
    return ""


def report(repeated: Sequence[Repeated], path: Path) -> str:
    """The list of what was repeated, as text; also written to `path`, empty if there was nothing."""
    lines = [line for one in repeated for line in one.lines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    if not lines:
        return "no test was repeated"
    head = f"##### {len(repeated)} repeated alone, listed in {path}; mend each of them"
    return "\n".join([head, *lines, "#####"])
