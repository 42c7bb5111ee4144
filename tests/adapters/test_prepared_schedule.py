"""A prepared schedule moves once for each process whose samples a step has, and not for each that is there."""

from __future__ import annotations

import pytest
import torch

from everstep.train.adapters.prepared import _full_size


def test_schedule_moves_as_often_as_a_step_has_the_samples_of_processes() -> None:
    from accelerate import Accelerator  # noqa: PLC0415  it takes seconds
    from accelerate.state import AcceleratorState, PartialState  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer, schedule = accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100))
    processes = [3]
    _full_size(schedule, lambda: processes[0])
    for moves, last in ((3, 3), (4, 7)):
        processes[0] = moves
        optimizer.step()
        schedule.step()
        assert schedule.scheduler.last_epoch == last
    assert (PartialState().num_processes, AcceleratorState().num_processes, accelerator.num_processes) == (1, 1, 1)
    schedule.scheduler.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        schedule.step()
    assert (PartialState().num_processes, AcceleratorState().num_processes) == (1, 1)
