"""A run whose modules get buffers in the loop, or lose them, goes on from its commit as if it was not disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import everstep
from everstep.checkpoint import Checkpointer
from everstep.checkpoint.errors import StateMismatch


class Masked(torch.nn.Module):
    """Makes its buffer in the first forward pass, as many attention layers do."""

    mask: torch.Tensor | None

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("mask", None, persistent=persistent)
        self.register_buffer("masked", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = (torch.arange(4, device=x.device) < 3).to(x.dtype) * x.abs().mean()
        return self.linear(x * self.mask)


class OfAPart(torch.nn.Module):
    """The module with the buffer has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.norm = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class Scale(torch.nn.Module):
    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.register_buffer("scale", x.abs().amax(0))
        return x / self.scale


class Dropped(torch.nn.Module):
    """Has a buffer in the first passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.warm: torch.Tensor | None
        self.passes: torch.Tensor
        self.register_buffer("warm", torch.ones(3))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 3:
            self.warm = None
        return self.linear(x) * (1.0 if self.warm is None else 0.5)


def lazy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(3, 2))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "none until the first pass": Masked,
    "none until the first pass, not persistent": lambda: Masked(persistent=False),
    "of a part without parameters": OfAPart,
    "none from the third pass on": Dropped,
}


def train(make: Callable[[], torch.nn.Module], url: Path, until: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    dataset = torch.utils.data.TensorDataset(x, x[:, :2] * 2)
    with everstep.start(url, every_steps=4) as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(run.loader(dataset, global_batch=6), until=until):
            with step as batch:
                data, target = batch.data
                batch.scale(mse_loss(model(data), target)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.long_but("none until the first pass, not persistent")
@pytest.mark.parametrize("name", MODELS)
def test_run_restored_with_buffers_of_its_loop_ends_as_undisturbed(name: str, tmp_path: Path) -> None:
    if "not persistent" in name:
        # What no commit holds is made from the first batch of the new process: only the others go on.
        train(MODELS[name], tmp_path / "b", 4)
        assert "mask" not in train(MODELS[name], tmp_path / "b", 8)
        return
    undisturbed = train(MODELS[name], tmp_path / "a", 8)
    train(MODELS[name], tmp_path / "b", 4)
    resumed = train(MODELS[name], tmp_path / "b", 8)
    assert list(resumed) == list(undisturbed)
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


@pytest.mark.long
def test_lazy_module_is_refused_before_the_first_step_and_goes_on_after_a_forward_pass(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match=r"model/0\.weight: a lazy.*run a forward pass before"):
        train(lazy, tmp_path / "a", 4)

    def warm() -> torch.nn.Module:
        model = lazy()
        model(torch.ones(2, 4))
        return model

    undisturbed = train(warm, tmp_path / "b", 8)
    train(warm, tmp_path / "c", 4)
    resumed = train(warm, tmp_path / "c", 8)
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


def saved(model: torch.nn.Module, url: Path) -> None:
    with Checkpointer(url) as checkpointer:
        checkpointer.save(1, {"model": model})


@pytest.mark.long_but("options0-Masked")
@pytest.mark.parametrize("make", [Masked, lambda: Masked().double(), OfAPart])
@pytest.mark.parametrize("options", [{}, {"strict": False}])
def test_checkpointer_alone_makes_a_buffer_that_is_none_until_the_first_pass(
    make: Callable[[], torch.nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    giver, receiver = make(), make()
    x = torch.randn(3, 4, dtype=next(giver.parameters()).dtype)
    undisturbed = giver(x)
    saved(giver, tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"model": receiver}, **options)
    # Another batch would have made another buffer.
    assert [*receiver.state_dict()] == [*giver.state_dict()]
    assert torch.equal(receiver(x), undisturbed)
    assert torch.equal(receiver(2 * x), giver(2 * x))


def test_checkpointer_alone_refuses_a_buffer_that_is_none_by_a_setting_and_says_what_to_do(tmp_path: Path) -> None:
    """A commit would overrule the setting of torch's normalisation."""
    saved(torch.nn.BatchNorm1d(2), tmp_path)
    model = torch.nn.BatchNorm1d(2, track_running_stats=False)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(StateMismatch, match="is None here, by a setting"):
        checkpointer.restore({"model": model})
    assert model.running_mean is None


def test_session_whose_module_has_another_setting_is_refused(tmp_path: Path) -> None:
    def normed(*, tracks: bool) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4, track_running_stats=tracks), torch.nn.Linear(4, 2))

    train(lambda: normed(tracks=True), tmp_path, 4)
    with pytest.raises(StateMismatch, match=r"Unexpected key.*0\.running_mean"):
        train(lambda: normed(tracks=False), tmp_path, 8)


def test_buffer_that_the_module_does_not_know_is_refused(tmp_path: Path) -> None:
    giver = Masked()
    giver.register_buffer("other", torch.ones(1))
    saved(giver, tmp_path)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(StateMismatch, match="model/other is in the commit and"):
        checkpointer.restore({"model": Masked()})


def test_parameter_that_is_none_here_is_refused(tmp_path: Path) -> None:
    giver, receiver = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    saved(giver, tmp_path)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(StateMismatch, match="model/bias is in the commit and"):
        checkpointer.restore({"model": receiver})
