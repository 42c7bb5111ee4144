"""Refuses DataLoaders that a script trains on by itself, without giving them to the session.

A script may iterate its own DataLoader for an evaluation, but not for training. The session does not know the position
in such a loader. So a restart or a new process would begin it anew, and in a world that changes all ranks may train on
the same samples. The two uses are told apart as follows. An evaluation begins and ends between two steps, or inside of
one. Training goes on with the same iterator in later steps, or leaves one unfinished in each. Iteration without
gradients is never training.

Invariant: ranks that run the same script are refused after the same step. The module uses private names of torch;
tests/train/test_unmanaged_loaders.py watches them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from everstep.data import ElasticLoader
from everstep.data.fetching import Fetching
from everstep.recovery.errors import LoopError
from everstep.torch_private import loaders
from everstep.torch_private.patches import Replacements
from everstep.train.feeding.feed import Feed
from everstep.train.guards.script_objects import variables


class UnmanagedLoaders:
    """Watches from `begin` to `end`; call `step_over` after each step. `worlds_change`: a script may track a loader's
    position itself only if worlds do not change."""

    def __init__(self, *, worlds_change: bool) -> None:
        self._worlds_change = worlds_change
        self._feed: Feed | None = None
        self._tracked: tuple[Any, ...] = ()
        # Unfinished iterators of this step: each with its sampler, and the dataset that it reads.
        self._now: dict[int, tuple[weakref.ref[Any], Any, Any]] = {}
        self._before = weakref.WeakSet[Any]()  # unfinished iterators of earlier steps
        self._replaced = Replacements()
        self._last: dict[int, Any] = {}  # samplers whose iterators the last step left unfinished

    def begin(self, feed: Feed | None, state: Mapping[str, Any]) -> None:
        """Watch all loaders but those that `feed` reads itself. `state`: the tracked state."""
        self._feed = feed
        if not self._worlds_change:
            self._tracked = tuple(state.values())
        loaders.replace_next(self._replaced, lambda advance: partial(self._next, advance))

    def end(self) -> None:
        self._replaced.end()

    def steps_begin(self) -> None:
        """The steps of an epoch begin. The script was not training on samples that it read before, for example to look
        at a batch."""
        self._now.clear()

    def step_over(self, number: int) -> None:
        """Step number `number` is complete. Raises LoopError."""
        if not self._now and not self._last:
            return
        drawn = list(self._now.values())
        repeated = [(s, data) for it, s, data in drawn if it() in self._before or id(s) in self._last]
        if repeated:
            raise LoopError(
                f"steps {number - 1} and {number}: {_name(*repeated[0])} is iterated by the script itself, to train on."
                " Its position is not saved, so a new process would start it from the front, and it is not cut for"
                " the processes of the present world, which may all train on the same samples. Pass it to the"
                " session: `for step in run.steps(loader, …):`,"
                " then `with step as batch:` and `x, y = batch.data`; several as"
                " run.steps((a, b), …). Or make it by run.loader(dataset, global_batch=…). (A loader to evaluate on is"
                " iterated under torch.no_grad())"
            )
        self._last = {id(s): s for _, s, _ in drawn}
        for it, _, _ in drawn:
            if (alive := it()) is not None:
                self._before.add(alive)
        self._now.clear()

    def _next(self, advance: Any, iterator: Any) -> Any:
        try:
            data = advance(iterator)
        except StopIteration:
            self._now.pop(id(iterator), None)
            self._before.discard(iterator)
            raise
        if loaders.given_by(iterator) == 1:  # with persistent workers, the same iterator begins again
            self._before.discard(iterator)
        if id(iterator) not in self._now and torch.is_grad_enabled() and not self._position_is_kept(iterator):
            read = weakref.ref(iterator), loaders.sampler_of(iterator), loaders.dataset_of(iterator)
            self._now[id(iterator)] = read
        return data

    def _position_is_kept(self, iterator: Any) -> bool:
        if self._feed is not None and self._feed.reads(loaders.dataset_of(iterator)):
            return True
        sampler = loaders.sampler_of(iterator)
        parts = (sampler, getattr(sampler, "sampler", None), loaders.dataset_of(iterator))
        return any(
            any(target is part for part in parts)
            or (isinstance(target, DataLoader) and loaders.sampler_of(target) is sampler)
            for target in self._tracked
        )


def _name(sampler: Any, dataset: Any) -> str:
    """A description of a loader: the script's variable that holds it, if there is one, and its dataset."""
    if isinstance(dataset, Fetching):
        kind, what = ElasticLoader.__qualname__, type(dataset.source).__qualname__
    else:
        order = type(getattr(sampler, "sampler", sampler)).__qualname__
        kind, what = DataLoader.__qualname__, f"{type(dataset).__qualname__}, {order}"
    for name, value in variables(sys._getframe(1)):
        own = isinstance(value, DataLoader) and loaders.sampler_of(value) is sampler
        if own or (isinstance(value, ElasticLoader) and value.reads(dataset)):
            return f"{name} = {kind}({what})"
    return f"a {kind}({what})"
