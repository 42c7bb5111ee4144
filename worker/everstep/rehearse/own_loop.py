"""Notes the steps of a script that has a loop of its own: with a `Checkpointer`, as plain torchrun scripts have, or
with Horovod's interface.

A step is one call of the script's first optimizer; where it has none, a step ends where the script asks whether to
save, or commits. Its number survives a restart by a mark beside each save, which says how many steps the state had
seen: what the script calls a step may be an epoch. A function of `hvd.elastic.run` goes back to its commits, so there
the mark is beside each commit (`by_commits`).
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from everstep.checkpoint import Checkpointer
from everstep.rehearse import record
from everstep.rehearse.watch import Watch, rank, replace_all, samples
from everstep.train.guards.sources import tree_of

_BETWEEN = {"torch", "everstep", "everstep_horovod"}  # whose functions stand between the script and its optimizer


class OwnLoop:
    """Of one process, beside the `watch` of the session's loop: it is silent where a run was started."""

    def __init__(self, watch: Watch, folder: Path) -> None:
        self._watch, self._marks = watch, folder / "marks"
        self._marks.mkdir(exist_ok=True)
        self._counted: int | None = None  # the id of the optimizer whose calls are the steps
        self._done = self._saved = 0  # steps of the state, and of the one that was saved last
        self.is_due = False  # whether the commit that is made now is to be saved
        self._passes = 0  # backward passes of the present step
        self._loaded = False  # a loader has given a batch since the step before
        self._batch: list[str] = []  # what the loader gave last, until a backward pass uses it
        self._iterator: Callable[[], Any] = lambda: None  # that has given it
        self._rank: Callable[[], int] = rank
        self._over: BaseException = SystemExit(0)  # all ranks have taken as many steps

    @property
    def _is_alone(self) -> bool:
        return self._watch.run is None and not self._watch.in_library

    @property
    def _by_saves(self) -> bool:
        return self._is_alone and not self._watch.by_commits

    def install(self) -> None:
        """Wrap the Checkpointer's public methods, and what gives a loop its batches, in this process."""
        restore, save, should_save = Checkpointer.restore, Checkpointer.save, Checkpointer.should_save
        given = dataloader._BaseDataLoaderIter.__next__

        def restored(checkpointer: Checkpointer, state: Any, **options: Any) -> int | None:
            found = restore(checkpointer, state, **options)
            if self._by_saves:
                self._goes_on(found, state)
            return found

        def saved(checkpointer: Checkpointer, step: int, state: Any, **options: Any) -> Any:
            if self._by_saves:
                self._watch.tracked |= dict(state)
                self._moved_by_hand()
                self._mark(step)
            return save(checkpointer, step, state, **options)

        def asked(checkpointer: Checkpointer, step: int) -> bool:
            if self._by_saves:
                self._moved_by_hand()
                self._watch.saves.wait()  # while a save is in flight the answer is no
            return should_save(checkpointer, step)

        def gives(iterator: Any) -> Any:
            batch = given(iterator)
            if self._is_alone:
                self._batch, self._loaded = samples(batch), True
                begins = self._iterator() is not iterator
                self._iterator, self._watch.position = ref(iterator), 1 if begins else self._watch.position + 1
            return batch

        replace_all(
            (Checkpointer, "restore", restored), (Checkpointer, "save", saved),
            (Checkpointer, "should_save", asked), (dataloader._BaseDataLoaderIter, "__next__", gives),
        )  # fmt: skip
        self._watch.on_backward = self._differentiates
        optimizers.register_optimizer_step_post_hook(self._moved)

    # --- for a loop that goes back to commits of its own

    def by_commits(self, rank: Callable[[], int], over: BaseException) -> None:
        """The loop begins. `over` is raised in it when it has taken as many steps as are rehearsed."""
        self._watch.by_commits, self._rank, self._over = True, rank, over
        (self._watch.folder / record.COMMITS).touch()

    def went_back(self, commit: int, state: Mapping[str, Any]) -> None:
        """The state is that of this commit; 0: from which the script begins."""
        self._watch.step, self._passes = None, 0
        self._watch.saves.forget()
        self._goes_on(commit or None, state)
        self._saved, self.is_due = self._done, False

    def commits(self, commit: int) -> None:
        """The loop is about to make this commit. `is_due`: it is to be saved, by the steps since the last save."""
        self._moved_by_hand()
        self._mark(commit)
        self.is_due = self._done - self._saved >= self._watch.every
        if self.is_due:
            self._saved = self._done

    def committed(self) -> None:
        """It has made it."""
        if self._watch.step is not None:
            self._watch.leaves()

    def _goes_on(self, step: int | None, state: Mapping[str, Any]) -> None:
        self._watch.tracked |= dict(state)
        self._done = self._seen(step)
        if self._watch.begins is not None and (step is None or step < self._watch.begins):
            self._watch.did_not_begin()

    def _mark(self, step: int) -> None:
        record.write_whole(self._marks / f"{step}-{self._rank()}", str(self._done))

    def _seen(self, step: int | None) -> int:
        """How many steps the commit of this step had seen."""
        mark = self._marks / f"{step}-{self._rank()}"
        return int(mark.read_text()) if mark.exists() else self._of_another_rank(step)

    def _of_another_rank(self, step: int | None) -> int:
        """The world was another one when it was saved."""
        found = next(iter(self._marks.glob(f"{step}-*")), None) if step is not None else None
        return int(found.read_text()) if found is not None else 0

    def _differentiates(self) -> None:
        """The script calls `backward`."""
        if not self._is_alone:
            return
        if self._passes == 0:
            if self._watch.step is not None:
                self._watch.leaves()  # the step before was in no commit
            self._watch.samples = []
            self._watch.enters(self._done, self._rank())
        self._watch.samples += self._batch
        self._batch = []
        self._passes += 1

    def _moved(self, optimizer: Any, *_: Any) -> None:
        if not self._is_alone or self._passes == 0 or self._counted not in (None, id(optimizer)):
            return
        self._counted = id(optimizer)
        self._step_is_over()

    def _moved_by_hand(self) -> None:
        """The script may have changed its parameters without an optimizer."""
        has_optimizer = any(isinstance(one, torch.optim.Optimizer) for one in self._watch.tracked.values())
        if self._passes > 0 and self._counted is None and not has_optimizer:
            self._step_is_over()

    def _step_is_over(self) -> None:
        self._passes = 0
        self._done += 1
        frame = _script_frame(sys._getframe(2))
        if self._watch.by_commits and frame is not None:
            self._watch.indices = _indices(frame.f_code.co_filename)
        self._watch.draws.end(by_loader=self._loaded)
        self._watch.note(self._done, self._rank(), frame)
        self._watch.draws.begin_own()
        self._loaded = False
        if self._watch.by_commits:
            self._watch.reach("tail")
        else:
            self._watch.leaves()
        if self._done >= self._watch.limit:
            raise self._over


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """The script's frame that called the optimizer."""
    while frame is not None and _BETWEEN & set(frame.f_globals.get("__name__", "").split(".")):
        frame = frame.f_back
    return frame


@functools.cache
def _indices(file: str) -> list[str]:
    """The names that loops over `enumerate` give its numbers, in a file of the script's."""
    loops = [n for n in ast.walk(tree_of(file) or ast.Module([], [])) if isinstance(n, ast.For)]
    firsts = [n.target.elts[0] for n in loops if isinstance(n.target, ast.Tuple) and _enumerates(n.iter)]
    return sorted({one.id for one in firsts if isinstance(one, ast.Name)})


def _enumerates(over: ast.expr) -> bool:
    calls = [n.func for n in ast.walk(over) if isinstance(n, ast.Call)]
    return any(isinstance(function, ast.Name) and function.id == "enumerate" for function in calls)
