"""Asks for a profile of the job in which this process is rank 0, as `everstep profile` does, and judges the answers."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.agents import ask
from everstep.contract.agent_requests import PROFILE
from everstep.instruments.live_profile import FOLDER, LiveProfile, summarize
from everstep.jobs.source import Where

NAME, STEPS, SECONDS = "first", 4, 120.0
_asked: list[threading.Thread] = []


def ask_once(live: LiveProfile, folder: Path) -> None:
    """Called in a step. Returns when the next one will be profiled, on all ranks: they wait for this one."""
    if _asked or os.environ["RANK"] != "0":
        return

    def work() -> None:
        found = ask(os.environ["TORCHELASTIC_RUN_ID"], Where(), PROFILE, SECONDS, [], steps=STEPS, id=NAME)
        (folder / "profile.json").write_text(json.dumps(found))

    _asked.append(threading.Thread(target=work))  # the process does not end before it
    _asked[0].start()
    while live.request_id is None and _asked[0].is_alive():
        time.sleep(0.01)


def answers(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "profile.json").read_text())
    return found


def check(folder: Path, commits: Path, ranks: list[int], *, left_out: int = 0, reads: bool = True) -> None:
    """The answers of these ranks are right; the others say why they have none. `reads`: batches come from a loader."""
    found = {one["rank"]: one for one in answers(folder)}
    assert [rank for rank, one in found.items() if "error" not in one] == ranks, found
    for rank in ranks:
        one = found[rank]
        assert (one["steps"] + one["left_out"], one["left_out"]) == (STEPS, left_out), one
        assert 0 < one["communication"] < 1, one
        assert 0 < one["input"] < 1 if reads else one["input"] is None, one
        kept = commits / FOLDER / NAME / f"rank-{rank}.json.gz"
        assert one["trace"].endswith(str(kept))
        events = json.loads(gzip.decompress(kept.read_bytes()))["traceEvents"]
        assert summarize(events).communication == pytest.approx(one["communication"])
    for rank, one in found.items():
        assert rank in ranks or one["error"] == "the process ended before its profile was complete", one
