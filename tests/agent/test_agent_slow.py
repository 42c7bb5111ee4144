"""A job with a rank that is much slower than the others: it is named with where its time goes, and nothing else happens
(failure 64)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.agent.agent_job import HERE, Job


@pytest.mark.long
@pytest.mark.parametrize(
    ("slow", "where"),
    [
        ({"pause": 0.03}, "most of the difference: not in its input"),
        ({"slow_input": 0.03, "workers": 0}, "most of the difference: it waits longer for its next batch"),
    ],
)
def test_a_rank_that_is_five_times_slower_is_named_and_stays(
    job: Callable[..., Job], tmp_path: Path, slow: dict[str, float], where: str
) -> None:
    wanted = json.dumps({"out": str(tmp_path), "slow_rank": 1, **slow})
    run = job(HERE / "session_script.py", wanted)
    agents = run.start(3)

    def said() -> list[str]:
        logs = (a.log.read_text() for a in agents)
        return [line for log in logs for line in re.findall(r"(?:this is the slow one: )?rank \d is slow: .*", log)]

    def both() -> list[str]:
        lines = said()
        return lines if len({line.startswith("this is the slow one") for line in lines}) == 2 else []

    named = run.until(both, "the slow rank is not named by rank 0 and itself")
    print(*named, sep="\n")
    assert all("rank 1 is slow" in line and line.endswith(where) for line in named)
    run.trains([pid for a in agents for pid in a.trainers()], 0, 3)
    assert not any("round 2:" in a.log.read_text() for a in agents)
