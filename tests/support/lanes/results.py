"""What each test of a run came to, as `results.json`: test, lane, outcome, seconds, commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.lanes.repeats import Outcome

DID_NOT_RUN = "did not run"


def of_lane(lane: str, outcome: Outcome, commit: str) -> list[dict[str, Any]]:
    """One for each test that was collected. The outcome is `passed`, `failed`, `skipped`, `passed alone` or
    `did not run`."""
    record = outcome.record
    alone = {test for one in outcome.repeated if not one.again for test in one.failure.tests}
    found = []
    for test in sorted(record.collected | record.ended | set(record.failed)):
        if test in record.failed:
            how = "passed alone" if test in alone else "failed"
        elif test not in record.ended:
            how = DID_NOT_RUN
        else:
            how = "passed" if test in record.passed else "skipped"
        seconds = round(record.seconds.get(test, 0.0), 3)
        found.append({"test": test, "lane": lane, "outcome": how, "seconds": seconds, "commit": commit})
    return found


def write(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A test a line, whole or not at all: it is written again after each lane."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in results) + "\n]\n")
    new.replace(path)
