"""The walk over a script's objects gives each the name that the script would write."""

from __future__ import annotations

import torch

from everstep.train.guards.script_objects import walk


def test_parameter_has_the_name_of_what_holds_it_and_not_of_a_variable_left_over_from_a_loop() -> None:
    average = torch.nn.Linear(2, 1)
    alone = torch.nn.Parameter(torch.zeros(1))
    roots = {"p": average.bias, "alone": alone, "average": average}
    names = [held.name for held in walk(roots.items())]
    assert names == ["average", "average.weight", "average.bias", "alone"]
