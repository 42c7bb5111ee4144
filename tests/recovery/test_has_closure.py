"""Whether an optimizer's step is given a closure, as torch's own hooks tell it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everstep.recovery.state.optimizers import before_step, has_closure


class Scaled(torch.optim.SGD):
    def step(self, closure: Any = None, *, grad_scale: float = 1.0) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        ((), {}, False),
        ((None,), {}, False),
        ((), {"closure": None}, False),
        ((), {"grad_scale": 2.0}, False),
        ((lambda: torch.zeros(()),), {}, True),
        ((), {"closure": lambda: torch.zeros(())}, True),
    ],
)
def test_step_has_a_closure_only_if_one_is_given(given: Any, options: Any, expected: bool) -> None:
    optimizer = Scaled([torch.zeros(1, requires_grad=True)], lr=0.1)
    found: list[bool] = []
    before_step(optimizer, lambda _, arguments, named: found.append(has_closure(arguments, named)))
    optimizer.step(*given, **options)
    assert found[0] is expected
