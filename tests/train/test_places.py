"""What a commit holds of a model that a script divides over the ranks of a replica: each place's, by its own name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.checkpoint import Checkpointer, StateMismatch
from everstep.recovery.errors import LoopError
from everstep.recovery.state.model_parts import Placed, advice, check
from everstep.train.coordination.step_coordinator import StepCoordinator


def trained(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    schedule.step()
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "seen": {"loss": float(seed)}, "count": seed}


def told(state: dict[str, Any]) -> Any:
    found = {key: target.state_dict() for key, target in state.items() if hasattr(target, "state_dict")}
    return repr((found, state["seen"], state["count"]))


def test_what_torch_made_has_the_place_in_its_name_and_all_else_has_not() -> None:
    placed = Placed(trained(1), 0, 2)
    assert sorted(placed) == ["count", "model@0of2", "optimizer@0of2", "schedule@0of2", "seen"]
    assert len(placed) == 5
    with pytest.raises(KeyError):
        placed["model"]
    with pytest.raises(KeyError):
        placed["model@1of2"]


def test_a_new_process_of_the_place_gets_what_it_saved(tmp_path: Path) -> None:
    state, fresh = trained(1), trained(2)
    with Checkpointer(tmp_path) as saving:
        saving.save(5, Placed(state, 1, 2)).wait()
    assert told(fresh) != told(state)
    with Checkpointer(tmp_path) as loading:
        assert loading.restore(Placed(fresh, 1, 2)) == 5
    assert told(fresh) == told(state)


def test_what_was_never_stepped_gets_its_optimizers_state_too(tmp_path: Path) -> None:
    state = trained(1)
    with Checkpointer(tmp_path) as saving:
        saving.save(5, Placed(state, 1, 2)).wait()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fresh = {"model": model, "optimizer": optimizer, "schedule": schedule, "seen": {}, "count": 0}
    with Checkpointer(tmp_path) as loading:
        loading.restore(Placed(fresh, 1, 2))
    assert told(fresh) == told(state)


def test_another_place_and_another_division_are_refused_and_get_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as saving:
        saving.save(5, Placed(trained(1), 0, 2)).wait()
    for place, places in ((1, 2), (0, 4)):
        state = trained(2)
        with pytest.raises(StateMismatch, match="model@0of2"):
            Checkpointer(tmp_path).restore(Placed(state, place, places))
        assert told(state) == told(trained(2))


def test_what_a_commit_would_keep_of_rank_0_alone_is_refused_by_name() -> None:
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(LoopError, match=r"track\(weight=.*torch\.nn\.Parameter"):
        check({"weight": weight})
    with pytest.raises(LoopError, match=r"optimizer trains a tensor of shape \[2\].*Track the module"):
        check({"model": torch.nn.Linear(1, 1), "optimizer": torch.optim.SGD([weight], lr=0.1)})


@pytest.mark.long_but("1-2-had no run\\\\.mesh\\\\(model=N\\\\).*Write none here too")
@pytest.mark.parametrize(
    ("saved", "restoring", "words"),
    [
        (2, 4, r"had run\.mesh\(model=2\).*Write run\.mesh\(model=2\) here too"),
        (2, 1, r"had run\.mesh\(model=2\).*Write run\.mesh\(model=2\) here too"),
        (1, 2, r"had no run\.mesh\(model=N\).*Write none here too"),
    ],
)
def test_commit_of_another_division_is_refused_with_the_mesh_that_it_needs(
    saved: int, restoring: int, words: str, tmp_path: Path
) -> None:
    def named(places: int) -> Any:
        return lambda state: state if places == 1 else Placed(state, 0, places)

    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.restore(named(saved)(trained(1)))
        checkpointer.save(3, named(saved)(trained(1)))
    coordinator = StepCoordinator.find(str(tmp_path), None, None, {})
    coordinator.named = named(restoring)
    with pytest.raises(StateMismatch, match=words):
        coordinator.restore(trained(2))


def test_refusal_for_another_reason_is_left_as_it_is() -> None:
    assert advice("model/0.weight: shape (3,) in the commit, and (4,) here", 2) == ""
    assert advice("the commit has no 'average@0of2'; it has model@0of2, model@1of2", 2) == ""
    assert advice("the commit has no 'average'; it has model", 1) == ""
