"""What `run.pipeline` calls in each round, and what it refuses."""

from __future__ import annotations

import pytest
import torch

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


class Divided(Schedule):
    _n_microbatches = 5

    def step(self, *, target: torch.Tensor) -> str:
        return f"{len(target)} rows"


def test_target_whose_rows_the_micro_batches_do_not_divide_is_refused() -> None:
    """Of 96 rows torch makes four micro-batches of 20 rows and one of 16, whose rows would weigh more. With one stage
    nothing is sent whose shape could show it."""
    pipeline = PipelineSchedule(Divided, lambda: None)
    assert pipeline.step(target=torch.zeros(95)) == "95 rows"
    with pytest.raises(LoopError, match=r"96 rows, which 5 micro-batches do not divide.*a multiple"):
        PipelineSchedule(Divided, lambda: None).step(target=torch.zeros(96))
