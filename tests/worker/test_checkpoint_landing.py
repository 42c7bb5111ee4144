"""Restoring into the live tensors' own memory: where it is done, and what a commit that does not fit leaves alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint.errors import StateMismatch


def trained(seed: int, width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(9, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(url: Path, state: dict[str, Any]) -> None:
    with everstep.Checkpointer(str(url)) as checkpointer:
        checkpointer.restore({})
        checkpointer.save(1, state).wait(60)


def addresses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    found = [t.data_ptr() for t in model.state_dict().values()]
    return found + [t.data_ptr() for s in optimizer.state.values() for t in s.values()]


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [t.clone() for t in model.state_dict().values()]
    return found + [t.clone() for s in optimizer.state.values() for t in s.values()]


def test_state_that_fits_keeps_its_memory(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save(tmp_path, {"model": model, "optimizer": optimizer})
    other, other_optimizer = trained(2)
    before = addresses(other, other_optimizer)
    everstep.Checkpointer(str(tmp_path)).restore({"model": other, "optimizer": other_optimizer})
    assert addresses(other, other_optimizer) == before
    right = content(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(content(other, other_optimizer), right, strict=True))


def test_optimizer_without_state_gets_all_of_it(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save(tmp_path, {"model": model, "optimizer": optimizer})
    other, _ = trained(2)
    fresh = torch.optim.AdamW(other.parameters())
    everstep.Checkpointer(str(tmp_path)).restore({"model": other, "optimizer": fresh})
    assert all(torch.equal(a, b) for a, b in zip(content(other, fresh), content(model, optimizer), strict=True))


@pytest.mark.parametrize("width", [32, 65])
def test_commit_of_another_shape_is_not_read_into_the_state(tmp_path: Path, width: int) -> None:
    model, optimizer = trained(1)
    save(tmp_path, {"model": model, "optimizer": optimizer})
    other, other_optimizer = trained(2, width)
    before = content(other, other_optimizer)
    with pytest.raises(StateMismatch, match="does not fit"):
        everstep.Checkpointer(str(tmp_path)).restore({"model": other, "optimizer": other_optimizer})
    # torch's load_state_dict itself sets what it can of a model before it refuses the rest.
    wide = [i for i, t in enumerate(before) if width in t.shape]
    assert wide
    assert all(torch.equal(content(other, other_optimizer)[i], before[i]) for i in wide)


def test_commit_without_a_key_that_is_asked_for_changes_nothing(tmp_path: Path) -> None:
    model, _ = trained(1)
    save(tmp_path, {"model": model})
    other, other_optimizer = trained(2)
    before = content(other, other_optimizer)
    with pytest.raises(StateMismatch, match="has no 'optimizer'"):
        everstep.Checkpointer(str(tmp_path)).restore({"model": other, "optimizer": other_optimizer})
    assert all(torch.equal(a, b) for a, b in zip(content(other, other_optimizer), before, strict=True))


def test_strided_and_tied_tensors_get_their_values(tmp_path: Path) -> None:
    weight = torch.randn(40, 30)
    state = {"a": weight, "b": weight, "c": weight.t(), "d": {"x": weight[::2]}}
    save(tmp_path, state)
    mine = torch.zeros(40, 30)
    other = torch.zeros(80, 60)[::2, ::2].t()
    found: dict[str, Any] = {"a": mine, "b": torch.zeros(40, 30), "c": other, "d": {"x": torch.zeros(20, 30)}}
    everstep.Checkpointer(str(tmp_path)).restore(found)
    assert found["a"] is mine
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight)
    assert torch.equal(found["c"], weight.t())
    assert torch.equal(found["d"]["x"], weight[::2])


def test_state_is_right_after_a_damaged_commit_was_read_into_it(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    right = content(model, optimizer)
    with everstep.Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.restore({})
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).wait(60)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        checkpointer.save(2, {"model": model, "optimizer": optimizer}).wait(60)
    newest = max(tmp_path.glob("data/*/*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    other, other_optimizer = trained(2)
    assert everstep.Checkpointer(str(tmp_path)).restore({"model": other, "optimizer": other_optimizer}) == 1
    assert all(torch.equal(a, b) for a, b in zip(content(other, other_optimizer), right, strict=True))
