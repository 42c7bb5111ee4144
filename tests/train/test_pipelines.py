"""What `run.pipeline` calls in each round, and what it refuses."""

from __future__ import annotations

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.pipelines import PipelineSchedule


class Schedule:
    def step(self) -> str:
        return "made before"


def test_schedule_that_make_kept_from_before_is_refused() -> None:
    """Its stages would send activations to a process that is new, and that asks for shapes."""
    kept = Schedule()
    rounds: list[int | None] = [None]
    pipeline = PipelineSchedule(lambda: kept, lambda: rounds[0])
    assert pipeline.step() == "made before"
    rounds[0] = 2
    with pytest.raises(LoopError, match=r"make\(\) made no stage.*Make all stages in make\(\)"):
        pipeline.step()


def test_what_make_returns_and_is_no_schedule_is_refused_by_its_class() -> None:
    with pytest.raises(LoopError, match=r"make\(\) returned a int, and a schedule is expected"):
        PipelineSchedule(lambda: 1, lambda: 1).step()
