"""`hvd.DistributedOptimizer`: an optimizer that averages gradients over the ranks before it steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep_horovod.collectives import Op, checked, chosen
from everstep_horovod.compression import Compression
from everstep_horovod.gradients import Gradients, Reduction
from everstep_horovod.world import current

_made: weakref.WeakSet[Any] = weakref.WeakSet()


class _Counted:
    """The steps of one optimizer of this process: the first that has stepped, of several that take turns. Profiles
    count them: a script may commit once in many, or never."""

    optimizer: weakref.ref[Any] | None = None
    steps = 0


def _stepped(optimizer: Any) -> None:
    if _Counted.optimizer is None or _Counted.optimizer() is None:
        _Counted.optimizer = weakref.ref(optimizer)
    if _Counted.optimizer() is optimizer:
        _Counted.steps += 1
        if (live := current().live_profile).request_id is not None:
            live.step_begins(_Counted.steps, current().rank)


def made_here() -> list[Any]:
    """The optimizers of this process."""
    return list(_made)


class Distributed:
    """What the optimizer's own class gets. Its `step`, `state_dict` and `param_groups` stay those of that class."""

    _gradients: Gradients
    _first: torch.optim.Optimizer  # the one that was wrapped
    _synchronized = False  # by the script itself
    _synchronizes = True
    averaged = 0  # how often gradients were averaged

    def synchronize(self) -> None:
        """Wait until the gradients are averaged, to clip or unscale them. Then
        `with optimizer.skip_synchronize(): optimizer.step()`."""
        self._gradients.synchronize(p for group in self.param_groups for p in group["params"])  # type: ignore[attr-defined]
        self._synchronized = True
        self.averaged += 1

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not average the gradients once more."""
        if not self._synchronized:
            raise LoopError(
                "optimizer.skip_synchronize() before optimizer.synchronize(): the gradients would not be averaged. "
                "Call optimizer.synchronize() behind loss.backward()"
            )
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True
            # GradScaler may have left the step out.
            self._synchronized = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes are summed up for one step."""
        self._gradients.passes = passes
        self._gradients.forget()

    @property
    def pending(self) -> bool:
        """Whether there are gradients that no step has used."""
        return self._gradients.begun

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise LoopError(
                "optimizer.step(closure) of hvd.DistributedOptimizer: the gradients that the closure makes would not "
                "be averaged. Call loss.backward() before optimizer.step()"
            )
        if self._synchronizes and not self._synchronized:
            self.synchronize()
        self._synchronized = False
        result = super().step()  # type: ignore[misc]
        _stepped(self)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch would call its hooks twice, here and in the class's own

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._gradients.travel:
            raise LoopError(
                "optimizer.zero_grad() between loss.backward() and optimizer.step(): the gradients are under way. Call "
                "it before the backward pass or behind the step"
            )
        self._gradients.forget()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._gradients.forget()
        self._synchronized = False
        # torch makes new dictionaries. A schedule that was made with the first optimizer must change these.
        self._first.param_groups, self._first.state = self.param_groups, self.state  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """The optimizer with averaged gradients; it shares parameters, settings and state with the one that is passed.

    `backward_passes_per_step`: gradients of so many passes are summed before they travel. `gradient_predivide_factor`:
    gradients are divided by it before the sum, and multiplied behind it. `num_groups` and `groups` have no effect: the
    buckets are chosen here. Raises `LoopError`.
    """
    checked(process_set)
    if isinstance(optimizer, Distributed):
        raise LoopError("hvd.DistributedOptimizer() of a DistributedOptimizer: gradients would be averaged twice")
    op = chosen(op)
    if op not in (Op.Average, Op.Sum):
        raise LoopError(f"hvd.DistributedOptimizer(op={op.name}): Average and Sum alone")
    if gradient_predivide_factor != 1.0 and op is not Op.Average:
        raise LoopError("gradient_predivide_factor= goes with op=hvd.Average alone")
    if backward_passes_per_step < 1:
        raise LoopError(f"backward_passes_per_step={backward_passes_per_step}: 1 or more is expected")
    how = Reduction(op, compression, backward_passes_per_step, gradient_predivide_factor, sparse_as_dense)
    kind = type(optimizer)
    # A commit names an optimizer's class, and a script asks isinstance: the name and the class stay.
    made: Any = type(kind.__name__, (Distributed, kind), {})
    wrapped = made.__new__(made)
    # A schedule sets `step` in the object, by which the gradients would not be averaged.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapped._first = optimizer
    _made.add(wrapped)
    wrapped._gradients = Gradients(_named(optimizer, named_parameters), how)
    return wrapped


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """The optimizer's parameters with their names, in its order."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"parameter {i}" for i, p in enumerate(own)}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise LoopError("named_parameters=: pairs of a name and a parameter are expected, model.named_parameters()")
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LoopError(f"named_parameters=: {', '.join(twice)} twice; give each parameter a name of its own")
    known = {p: name for name, p in pairs}
    if missing := sum(p not in known for p in own):
        raise LoopError(
            f"named_parameters=: {missing} of the optimizer's {len(own)} parameters are not named, and would not be "
            "averaged. Pass those of all models that it trains"
        )
    return {p: known[p] for p in own}
