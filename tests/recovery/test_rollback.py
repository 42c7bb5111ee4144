"""What a failed step leaves behind: nothing, or a torn state that says so."""

import copy
import random
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from everstep.checkpoint.state.capture import capture
from everstep.recovery.digests import content
from everstep.recovery.errors import LoopError
from everstep.recovery.rollback.rollback import Rollback
from everstep.recovery.validity import Validity


def parts(optimizers: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    state: dict[str, Any] = {"model": model, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0), "seen": {"n": [1]}}
    for i in range(optimizers):
        # One of them has only what it needs for a step of its own.
        state[f"optimizer{i}"] = torch.optim.SGD(model.parameters(), lr=0.1)
        state[f"scheduler{i}"] = torch.optim.lr_scheduler.StepLR(state[f"optimizer{i}"], 1)
    return state


def forward(state: dict[str, Any]) -> torch.Tensor:
    state["model"].zero_grad()
    loss = state["model"](torch.randn(8, 3)).sum()
    state["scaler"].scale(loss).backward()
    state["scaler"].unscale_(state["optimizer0"])
    return loss.detach()


def contents(state: dict[str, Any]) -> Any:
    return (
        [t.clone() for t in state["model"].state_dict().values()], state["scheduler0"].state_dict(),
        state["scaler"].state_dict(), copy.deepcopy(state["seen"]), torch.get_rng_state().clone(), random.getstate(),
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and repr(a[1:]) == repr(b[1:])


def ordinary(state: dict[str, Any], rollback: Rollback, step: int) -> None:
    """A step up to its first collective behind the optimizer."""
    rollback.begin(step)
    forward(state)
    state["scaler"].step(state["optimizer0"])
    state["scaler"].update()
    state["seen"]["n"].append(step)
    rollback.collective("allreduce", [torch.zeros(2)])


def lost(rollback: Rollback) -> Validity:
    """The step in hand fails."""
    return rollback.roll_back()


def test_step_that_failed_before_its_optimizer_leaves_no_trace_and_repeats_to_the_same_bits() -> None:
    state = parts()
    rollback = Rollback(state, lambda: None)
    rollback.begin(0)
    before = contents(state)
    first = forward(state)
    state["scaler"].update(9.0)
    state["seen"]["n"].append(2)
    state["optimizer0"].param_groups[0]["lr"] = 7.0
    random.random()
    assert lost(rollback) is Validity.WHOLE
    assert same(contents(state), before)
    assert state["optimizer0"].param_groups[0]["lr"] == 0.1
    assert all(p.grad is None for p in state["model"].parameters())
    assert torch.equal(forward(state), first)


def everything(state: dict[str, Any]) -> Any:
    """All that a step moves, of its values."""
    captured = capture(state, 0)
    return {name: content(t) for name, t in captured.tensors.items()}, captured.values


OPTIMIZERS = ["sgd", "adam", "lbfgs", "lookahead", "sets", "named", "late"]


@pytest.mark.long_but("sgd")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_with_a_collective_behind_its_optimizer_is_taken_back_to_the_bit(optimizer: str) -> None:
    """From its second time on, when the script is known for it; new state of the optimizer goes, too."""
    state = parts()
    parameters = state["model"].parameters()
    match optimizer:
        case "adam":
            state["optimizer0"] = torch.optim.AdamW(parameters, lr=0.1, amsgrad=True)
        case "lbfgs":
            state["optimizer0"] = torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)
        case "lookahead":
            state["optimizer0"] = Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        case "sets" | "named" | "late":
            state["optimizer0"] = Own(parameters, optimizer)
    del state["scheduler0"], state["scaler"]

    def work(step: int) -> None:
        rollback.begin(step)

        def closure() -> torch.Tensor:
            state["model"].zero_grad()
            loss: torch.Tensor = state["model"](torch.randn(8, 3)).square().sum()
            loss.backward()
            return loss

        state["optimizer0"].step(closure)
        state["seen"]["n"].append(step)
        rollback.collective("allreduce", [torch.zeros(2)])

    rollback = Rollback(state, lambda: None)
    work(0)
    rollback.ended()
    for step in range(1, 5):
        before = everything(state)
        work(step)
        first = everything(state)
        assert first != before
        assert lost(rollback) is Validity.WHOLE
        assert everything(state) == before
        work(step)
        assert everything(state) == first
        rollback.ended()


class Part(NamedTuple):
    parameter: torch.Tensor
    velocity: torch.Tensor


class Own(torch.optim.SGD):
    """Keeps its parameters in a set, or with their velocities, or an average that it makes in its third step."""

    def __init__(self, parameters: Any, kind: str) -> None:
        found = list(parameters)
        super().__init__(found, lr=0.1)
        self.kind, self.found, self.count = kind, set(found), 0
        self.parts = deque(Part(p, torch.zeros_like(p)) for p in found)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        with torch.enable_grad():
            closure()
        for p in self.found if self.kind == "sets" else ():
            p.sub_(p.grad * 0.1)
        for part in self.parts if self.kind != "sets" else ():
            part.velocity.lerp_(part.parameter.grad, 0.5)  # type: ignore[arg-type]
            part.parameter.sub_(part.velocity * 0.1)
        if self.kind == "late" and self.count > 2:
            if not hasattr(self, "average"):
                self.average = [torch.zeros_like(part.parameter) for part in self.parts]
            for average, part in zip(self.average, self.parts, strict=True):
                average.lerp_(part.parameter, 0.5)
                part.parameter.copy_(average)


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 0.1 / self.count


@pytest.mark.parametrize("part", [Counting(), torch.nn.Linear(2, 2)], ids=["called", "module"])
def test_step_of_an_optimizer_that_holds_what_cannot_be_copied_is_not_repeated(part: Any) -> None:
    state = parts()
    state["optimizer0"].__class__ = type("Own", (torch.optim.SGD,), {})
    state["optimizer0"].part = part
    rollback = Rollback(state, lambda: None)
    ordinary(state, rollback, 0)
    rollback.ended()
    rollback.begin(1)
    forward(state)
    assert lost(rollback) is Validity.WHOLE
    ordinary(state, rollback, 1)
    assert lost(rollback) is Validity.TORN
    assert "optimizer0.part cannot be copied" in rollback.torn


def test_objects_in_a_tracked_dictionary_go_back_in_their_places() -> None:
    """The script has names of its own for them, and may have put one in another's place."""
    counts, recent = np.zeros(3), [0]
    seen: dict[str, Any] = {"counts": counts, "now": recent, "before": [7]}
    rollback = Rollback({"seen": seen, "alone": counts}, lambda: None)
    rollback.begin(0)
    counts += 1
    recent.append(1)
    seen["before"] = seen["now"]
    assert lost(rollback) is Validity.WHOLE
    assert seen["counts"] is counts
    assert seen["now"] is recent
    assert (counts.tolist(), recent, seen["before"]) == ([0, 0, 0], [0], [7])


class Lookahead(torch.optim.Optimizer):
    """Every second step is half of one, from weights that it keeps beside `state`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__([p for g in base.param_groups for p in g["params"]], {})
        self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)
        self.count += 1
        if self.count % 2:
            return
        with torch.no_grad():
            for slow, p in zip(self.slow, (p for g in self.base.param_groups for p in g["params"]), strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict(), "slow": self.slow, "count": self.count}


def test_step_of_a_process_that_has_not_seen_the_collective_behind_its_optimizer_is_torn() -> None:
    state = parts()
    rollback = Rollback(state, lambda: None)
    ordinary(state, rollback, 0)
    assert lost(rollback) is Validity.TORN
    assert "no step of this process had shown before" in rollback.torn


def test_state_that_has_no_room_for_a_copy_is_torn_and_the_log_names_the_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everstep.recovery.rollback.rollback.free_memory", lambda device: 64)
    state = parts()
    rollback = Rollback(state, lambda: None)
    for step in range(3):
        ordinary(state, rollback, step)
        rollback.ended()
    ordinary(state, rollback, 3)
    assert lost(rollback) is Validity.TORN
    assert "has no room on cpu" in rollback.torn
    assert [r.levelname for r in caplog.records if "behind the block `with step:`" in r.message] == ["WARNING"]


def test_tensor_that_a_step_lets_share_anothers_memory_has_its_own_again() -> None:
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    state: dict[str, Any] = {"a": torch.nn.ParameterList([a]), "b": torch.nn.ParameterList([b])}
    state["optimizer"] = torch.optim.SGD([a, b], lr=0.1)
    rollback = Rollback(state, lambda: None)
    for step in range(2):
        rollback.begin(step)
        a.grad = b.grad = None
        (a * b).sum().backward()
        state["optimizer"].step()
        rollback.collective("allreduce", [torch.zeros(2)])
        if step == 0:
            rollback.ended()
    rollback.begin(2)
    place = a.data_ptr(), b.data_ptr()
    was = [a.detach().clone(), b.detach().clone()]
    state["optimizer"].step()
    b.data = a.data
    assert lost(rollback) is Validity.WHOLE
    assert (a.data_ptr(), b.data_ptr()) == place
    assert torch.equal(a, was[0])
    assert torch.equal(b, was[1])


def test_momentum_that_was_replaced_before_the_optimizer_stepped_is_seen() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rollback = Rollback({"model": model, "optimizer": optimizer}, lambda: None)
    for step in range(7):
        rollback.begin(step)
        if step == 6:
            for values in optimizer.state.values():
                values["momentum_buffer"] = values["momentum_buffer"] * 0.5
            assert lost(rollback) is Validity.TORN
            return
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rollback.ended()


def test_change_that_torch_does_not_count_is_found_when_the_watched_step_is_lost() -> None:
    average = torch.nn.Linear(200, 200)
    rollback = Rollback({"average": average}, lambda: None)
    rollback.begin(0)
    average.weight.data.mul_(0.9)
    assert lost(rollback) is Validity.TORN
    assert "average.weight" in rollback.torn


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_change_that_torch_does_not_count_is_refused_in_words_of_this_script(*, has_optimizer: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizers = {"optimizer": torch.optim.SGD(model.parameters())} if has_optimizer else {}
    rollback = Rollback({"model": model, **optimizers}, lambda: None)
    rollback.begin(0)
    model.weight.data.mul_(0.9)
    with pytest.raises(LoopError, match=r"weight was changed in step 0.*torch\.no_grad") as refused:
        rollback.ended()
    assert ("optimizer" in str(refused.value)) == has_optimizer


def test_extra_state_is_put_back() -> None:
    class Counts(torch.nn.Linear):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    model = Counts(2, 1)
    rollback = Rollback({"model": model}, lambda: None)
    model.calls = 3
    rollback.begin(0)
    model.calls = 4
    assert lost(rollback) is Validity.WHOLE
    assert model.calls == 3


def test_step_that_one_of_two_optimizers_made_is_torn() -> None:
    state = parts(optimizers=2)
    rollback = Rollback(state, lambda: None)
    for step in range(3):
        rollback.begin(step)
        forward(state)
        state["optimizer1"].step()
        state["scaler"].update()
        if step < 2:
            state["optimizer0"].step()
            rollback.ended()
    assert lost(rollback) is Validity.TORN
    assert "optimizer1" in rollback.torn


@pytest.mark.parametrize("closure", [True, False], ids=["in-its-step", "moved-by-hand"])
def test_state_that_moves_before_the_optimizer_has_stepped_is_torn(closure: bool) -> None:
    state = parts()
    rollback = Rollback(state, lambda: None)
    rollback.begin(0)

    def fails() -> float:
        raise ConnectionError

    if closure:
        with pytest.raises(ConnectionError):
            state["optimizer0"].step(fails)
    else:
        with torch.no_grad():
            state["model"][0].weight.add_(1)
    assert lost(rollback) is Validity.TORN
    assert ("optimizer0" if closure else "model") in rollback.torn


def test_parameter_that_a_collective_writes_into_is_not_put_back() -> None:
    state = parts()
    rollback = Rollback(state, lambda: None)
    rollback.begin(0)
    rollback.collective("broadcast", [state["model"][0].weight.data])
    assert lost(rollback) is Validity.TORN


def test_optimizer_does_not_step_in_a_round_that_is_over() -> None:
    class Over(RuntimeError):
        pass

    def refuse() -> None:
        raise Over

    state = parts()
    rollback = Rollback(state, refuse)
    rollback.begin(0)
    forward(state)
    before = [p.detach().clone() for p in state["model"].parameters()]
    with pytest.raises(Over):
        state["optimizer0"].step()
    assert rollback.refused == 1
    assert all(torch.equal(p, b) for p, b in zip(state["model"].parameters(), before, strict=True))
    assert lost(rollback) is Validity.WHOLE
    rollback.end()
    state["optimizer0"].step()


def test_step_before_does_not_count_for_the_present_one() -> None:
    state = parts()
    rollback = Rollback(state, lambda: None)
    ordinary(state, rollback, 0)
    rollback.ended()
    rollback.begin(1)
    forward(state)
    assert lost(rollback) is Validity.WHOLE


def test_buffers_that_forward_replaced_are_the_ones_of_the_beginning_again() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("grows", torch.ones(1))
    before = model.grows
    rollback = Rollback({"model": model}, lambda: None)
    rollback.begin(0)
    model.grows = torch.cat([model.grows, torch.ones(1)])  # type: ignore[list-item]
    model.register_buffer("late", torch.ones(1))
    assert lost(rollback) is Validity.WHOLE
    assert model.grows is before
    assert list(model._buffers) == ["grows"]


def test_gradients_are_zeros_where_there_were_some_and_none_where_there_were_none() -> None:
    state = parts()
    rollback = Rollback(state, lambda: None)
    (first, *others) = state["model"].parameters()
    first.grad = torch.zeros_like(first)
    rollback.begin(0)
    forward(state)
    assert lost(rollback) is Validity.WHOLE
    assert not first.grad.any()
    assert all(p.grad is None for p in others)


def test_step_that_failed_while_layers_were_frozen_or_in_evaluation_begins_as_it_began_before() -> None:
    """As a script does that freezes one network while another learns, and thaws it at the step's end."""
    state = parts()
    model = state["model"]
    model[0].bias.requires_grad_(False)
    rollback = Rollback(state, lambda: None)
    rollback.begin(0)
    model.eval()
    model[1].requires_grad_(False)
    model[0].bias.requires_grad_(True)
    assert lost(rollback) is Validity.WHOLE
    assert all(m.training for m in model.modules())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]


def test_step_that_was_lost_in_an_evaluation_at_its_end_begins_in_training_mode_again() -> None:
    state = parts()
    rollback = Rollback(state, lambda: None)
    for step in range(4):
        ordinary(state, rollback, step)
        rollback.ended()
    ordinary(state, rollback, 4)
    state["model"].eval()
    rollback.collective("allreduce", [torch.zeros(3)])
    assert lost(rollback) is Validity.WHOLE
    assert all(m.training for m in state["model"].modules())


class Codebook(torch.nn.Linear):
    """A large buffer that is moved without torch's count, as in public code of VQ-VAE, and one that is expanded."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("book", torch.zeros(600, 600))
        self.register_buffer("mask", torch.ones(1, 3).expand(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.book.data.mul_(0.9).add_(x.sum())
        return super().forward(x) * self.mask


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 6])
def test_large_buffer_that_is_moved_by_data_goes_back_to_where_the_step_began(step: int) -> None:
    state: dict[str, Any] = {"model": Codebook()}
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    rollback = Rollback(state, lambda: None)
    for number in range(step):
        rollback.begin(number)
        state["model"].zero_grad()
        state["model"](torch.randn(4, 3)).sum().backward()
        state["optimizer"].step()
        rollback.ended()
    before = everything(state)
    rollback.begin(step)
    state["model"](torch.randn(4, 3)).sum().backward()
    assert everything(state) != before
    assert lost(rollback) is Validity.WHOLE
    assert everything(state) == before


def test_what_a_collective_writes_that_was_under_way_when_its_step_failed_is_put_back_too() -> None:
    """As one of an averaging in the background does, of which another tensor's has failed: gloo goes on to the next."""
    state = parts()
    rollback = Rollback(state, lambda: None)
    ordinary(state, rollback, 0)
    rollback.ended()
    before = everything(state)
    ordinary(state, rollback, 1)
    assert lost(rollback) is Validity.WHOLE
    with torch.no_grad():
        state["model"][0].weight.add_(1)
        state["model"][1].running_mean.add_(1)
    rollback.roll_back_again()
    assert everything(state) == before
    state["seen"]["n"].append(9)
    after = everything(state)
    rollback.roll_back_again()
    assert everything(state) == after
