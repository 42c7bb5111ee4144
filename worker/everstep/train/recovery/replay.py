"""What a survivor's state is worth after a step that failed, and how the step is begun anew.

`WHOLE`: nothing tracked has moved since the step began but what was copied then and is put back. `TAIL_LOST`: all that
the step moves has moved, as far as the script's steps are known (`habit`). Else `TORN`. So a step is repeated or
counted only from a state that is known (ADR 0016).

The 1st, 2nd, 4th, 8th, … step of a world is watched: digests find what moves without torch's count of changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from everstep.train.gradients import Gradients
from everstep.train.optimizers import after_step, before_step
from everstep.train.randomness import generators_to_put_back
from everstep.train.recovery import digests
from everstep.train.recovery.agreement import Quality
from everstep.train.recovery.habit import Habit
from everstep.train.recovery.things import Hyperparameters, Optimizer, Schedule, things
from everstep.train.recovery.trees import address, version
from everstep.train.step import LoopError

SNAPSHOTS = 16  # collectives of a tail between which it is told what moves

# What of a tensor can be told apart: its bits, and what torch counts.
Print = tuple[int, int, int]


class Replay:
    """The tracked objects of a run. `begin` at a step's start; then `ended`, or if it failed `counts`, and `back`
    unless it does.

    `refuse` is called before each optimizer's step, and raises if the round is over by then. `collective` is to be
    called when a collective of the program's begins.
    """

    def __init__(self, state: Mapping[str, Any], refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._things = things(state)
        self._schedules = {t.name: t for t in self._things if isinstance(t, Schedule)}
        self.gradients = Gradients(state)
        by_hand = [name for name, s in self._schedules.items() if s.by_hand]
        self._habit = Habit([t.name for t in self._things if not t.quiet], by_hand)
        self._random = generators_to_put_back(state)
        self._generators: list[dict[str, Any]] = []
        self._count = 0  # steps of this world
        self.refused = 0  # optimizers' steps, by `refuse`
        self.torn = ""  # why the state is
        self._step = 0
        self._in_step = self._watched = False
        self._traces: dict[str, Any] = {}  # of what has not moved yet
        self._unmoved: dict[str, Print] = {}
        self._places: dict[int, str] = {}  # addresses of what is not copied
        self._untraced: str | None = None
        self._after_block: dict[str, Print] = {}  # a watched step's, at its end
        self.asked = False  # the script has asked whether the step counts
        self._redo: tuple[str, ...] = ()
        self._order: list[str] = []  # optimizers that have made their step
        self._open: list[str] = []  # that are in it
        self._entered = False
        self._tail: list[str] = []  # collectives since the last
        self._snapshots: list[dict[str, Any]] = []  # when each of them began
        self._written: str | None = None  # by a collective, since the step began or an optimizer stepped
        self._hooks: list[Any] = []
        for name, target in state.items():
            if isinstance(target, torch.optim.Optimizer):
                self._hooks.append(before_step(target, self._before(name)))
                self._hooks.append(after_step(target, self._after(name)))
        self._hooks += [hook for t in self._things if isinstance(t, Optimizer) for hook in t.hooks]

    def moved(self) -> None:
        """The world is another one."""
        self._count = self.gradients.updates = 0
        self._after_block = {}

    def begin(self, step: int) -> None:
        """Step number `step` begins. Raises `LoopError` for what follows the block and could not be recovered from."""
        self._check_gap()
        self._step, self._count = step, self._count + 1
        self._watched = not self._count & (self._count - 1)
        self._clear()
        for thing in self._things:
            if self._watched:
                thing.look()
            thing.begin()
        self._see()
        if self._watched:
            self._unmoved = self._prints(copied=False)
            self._places = {place: name for name, (_, place, _) in self._unmoved.items() if place}
        self.gradients.begin(watched=self._watched)
        self._generators = [generator.state_dict() for generator in self._random]
        self._in_step = True

    def collective(self, name: str, written: Any) -> None:
        """A collective of the program's begins, and writes into these tensors."""
        if not self._in_step:
            return
        tensors = list(_flat(written))
        if self._written is None:  # which torch does not count
            self._written = next((found for t in tensors if (found := self._places.get(address(t)))), None)
        if not self._order or len(self._order) < self._habit.longest or self._open:
            return
        self._tail.append(f"{name} of {sum(t.numel() for t in tensors)} {tensors[0].dtype if tensors else ''}")
        if len(self._snapshots) < SNAPSHOTS:
            self._snapshots.append(self._snapshot())

    def ended(self) -> None:
        """The step's block has ended well. Raises `LoopError` for what could not be recovered from."""
        self._in_step = False
        if self._watched and not self._entered:
            self._compare()
        self.gradients.ended(self._step)
        if self._untraced is not None:
            raise LoopError(
                f"{self._untraced} was changed in step {self._step} before the optimizer's step, and torch has not "
                "counted it (`.data`, numpy): if a peer is lost there, the step would be repeated from the changed "
                "values. Write `with torch.no_grad(): tensor.add_(…)` in place of `tensor.data.add_(…)`, or change it "
                "after optimizer.step()"
            )
        self._habit.ended(tuple(self._order), tuple(self._tail), self._behind(), self._moves())
        if self._watched:
            self._after_block = self._prints(copied=False)

    def counts(self) -> bool:
        """The step's block has failed: whether the step counts (`TAIL_LOST`). What follows the block runs then as after
        any step, so this is said before it."""
        self.torn = self._tear()
        if self.torn:
            return False
        for name in self._redo:
            self._schedules[name].step()
        self.gradients.put_back(stepped=True)
        return True

    def back(self) -> Quality:
        """The step does not count, and what follows its block has run: what the state is worth once it is put back."""
        self._in_step = False
        moved = self._written or next((what for t in self._things if (what := t.moved()) is not None), None)
        for thing in self._things:
            thing.put_back()
        for generator, drawn in zip(self._random, self._generators, strict=True):
            generator.load_state_dict(drawn)  # each rank's own, also of one that is given a state
        self.gradients.put_back()
        if not self._entered and moved is None:
            return Quality.WHOLE
        if not self._entered:
            self.torn = f"{moved} has moved"
        return Quality.TORN

    def _tear(self) -> str:
        """Why the step is not complete; nothing if it is."""
        if self._open:
            return f"{self._open[0]} was in its step"
        if not self._order:
            return "no optimizer has stepped"
        verdict = self._habit.judge(tuple(self._order), tuple(self._tail), self._moves())
        self._redo = verdict.redo
        if verdict.torn is None and self._written is not None:
            return f"{self._written} is written by a collective that follows the optimizer's step"
        return verdict.torn or ""

    def end(self) -> None:
        """The run is over."""
        self.gradients.end()
        for hook in self._hooks:
            hook.remove()

    def _clear(self) -> None:
        self._order, self._open, self._entered = [], [], False
        self._tail, self._snapshots, self._written = [], [], None

    def _before(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            try:
                self._refuse()
            except BaseException:
                self.refused += 1
                raise
            if self._in_step and not self._entered and self._watched:
                self._compare()
            self._entered = True
            self._open.append(name)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if name in self._open:
                self._open.remove(name)
            self._order.append(name)
            self._tail, self._snapshots, self._written = [], [], None
            self._habit.moved(name)

        return hook

    def _see(self) -> None:
        """Which of those that have not moved yet have."""
        unseen = self._habit.unseen
        if not unseen:
            self._traces = {}
            return
        traces = {t.name: t.trace() for t in self._things if t.name in unseen}
        for name, trace in traces.items():
            if self._traces.get(name, trace) != trace:
                self._habit.moved(name)
        self._traces = traces

    def _moves(self) -> dict[str, int]:
        return {name: schedule.moves() for name, schedule in self._schedules.items()}

    def _prints(self, *, copied: bool) -> dict[str, Print]:
        found: dict[str, Print] = {}
        for thing in self._things:
            for name, tensor in (*thing.contents(), *(thing.copied() if copied else ())):
                found[name] = (digests.content(tensor), address(tensor), version(tensor))
        return found

    def _compare(self) -> None:
        """Before the first optimizer: find what has moved without a trace."""
        for name, (bits, place, changes) in self._prints(copied=False).items():
            was = self._unmoved.get(name)
            if was is not None and was[1:] == (place, changes) and was[0] != bits:
                self._untraced = self._untraced or name

    def _check_gap(self) -> None:
        """Between two steps, after one that was watched. What follows the block runs for a lost step too, unless the
        script asks."""
        before, asked = self._after_block, self.asked
        self._after_block, self.asked = {}, False
        if not before or asked:
            return
        for name, now in self._prints(copied=False).items():
            if name in before and before[name][1:] == now[1:] and before[name] != now:
                raise LoopError(
                    f"{name} was changed after step {self._step}'s block, and torch has not counted it (`.data`, "
                    "numpy): what follows the block runs for a step that is lost, too, and would change it twice. "
                    "Write it behind `if step.completed:`, or into the block after optimizer.step()"
                )

    def _snapshot(self) -> dict[str, Any]:
        if not self._watched:
            return {t.name: t.trace() for t in self._things}
        return {
            t.name: (t.trace(), [digests.content(tensor) for _, tensor in (*t.contents(), *t.copied())])
            for t in self._things
        }

    def _behind(self) -> dict[str, int]:
        """How many collectives of the tail each thing has moved behind, if any."""
        if not self._tail:
            return {}
        shots = [*self._snapshots, self._snapshot()]
        found: dict[str, int] = {}
        for i, (one, next_) in enumerate(pairwise(shots), 1):
            position = i if i < len(self._snapshots) else len(self._tail)
            moved = {name for name, trace in one.items() if trace != next_[name]}
            scheduled = {id(s.optimizer) for name, s in self._schedules.items() if name in moved}
            for thing in self._things:
                if thing.name not in moved:
                    continue
                if isinstance(thing, Hyperparameters) and id(thing.optimizer) in scheduled:
                    continue  # the schedule has moved it
                found[thing.name] = position
        return found


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for tensor in tensors:
            yield from _flat(tensor)
