"""Notes the steps of a script that has a loop of its own and a `Checkpointer`, as plain torchrun scripts have.

A step is one call of the script's first optimizer. Its number survives a restart by a mark beside each save, which says
how many steps the state had seen: what the script calls a step may be an epoch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from everstep.checkpoint import Checkpointer
from everstep.rehearse.watch import Watch, rank, replace_all, samples

# It has steps of its own, and recovers in them.
_NOT_YET = "everstep_horovod"


class OwnLoop:
    """Of one process, beside the `watch` of the session's loop: it is silent where a run was started."""

    def __init__(self, watch: Watch, folder: Path) -> None:
        self._watch, self._marks = watch, folder / "marks"
        self._marks.mkdir(exist_ok=True)
        self._counted: int | None = None  # the id of the optimizer whose calls are the steps
        self._done = 0
        self._passes = 0  # backward passes of the present step
        self._batch: list[str] = []  # what the loader gave last, until a backward pass uses it

    @property
    def _is_alone(self) -> bool:
        return self._watch.run is None and not self._watch.in_library

    def install(self) -> None:
        """Wrap the Checkpointer's public methods, and what gives a loop its batches, in this process."""
        restore, save, given = Checkpointer.restore, Checkpointer.save, dataloader._BaseDataLoaderIter.__next__

        def restored(checkpointer: Checkpointer, state: Any, **options: Any) -> int | None:
            found = restore(checkpointer, state, **options)
            if self._is_alone:
                self._watch.tracked |= dict(state)
                self._done = self._seen(found)
                if found is None and self._watch.begins is not None:
                    self._watch.did_not_begin()
            return found

        def saved(checkpointer: Checkpointer, step: int, state: Any, **options: Any) -> Any:
            if self._is_alone:
                self._watch.tracked |= dict(state)
                (self._marks / f"{step}-{rank()}").write_text(str(self._done))
            return save(checkpointer, step, state, **options)

        def gives(iterator: Any) -> Any:
            batch = given(iterator)
            if self._is_alone:
                self._batch = samples(batch)
            return batch

        replace_all(
            (Checkpointer, "restore", restored), (Checkpointer, "save", saved),
            (dataloader._BaseDataLoaderIter, "__next__", gives),
        )  # fmt: skip
        self._watch.on_backward = self._differentiates
        optimizers.register_optimizer_step_post_hook(self._moved)

    def _seen(self, step: int | None) -> int:
        """How many steps the commit of this step had seen."""
        mark = self._marks / f"{step}-{rank()}"
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
            self._watch.samples = []
            self._watch.enters(self._done, rank())
        self._watch.samples += self._batch
        self._batch = []
        self._passes += 1

    def _moved(self, optimizer: Any, *_: Any) -> None:
        if not self._is_alone or self._passes == 0 or self._counted not in (None, id(optimizer)):
            return
        if _NOT_YET in sys.modules:
            raise SystemExit(
                "everstep rehearse: scripts of Horovod are not rehearsed yet; see docs/reference/rehearse.md"
            )
        self._counted, self._passes = id(optimizer), 0
        self._done += 1
        self._watch.note(self._done, rank(), _script_frame(sys._getframe(1)))
        self._watch.leaves()
        if self._done >= self._watch.limit:
            raise SystemExit(0)  # all ranks have taken as many steps


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """The script's frame that called the optimizer; what lies between is torch's."""
    while frame is not None and "torch" in frame.f_globals.get("__name__", "").split("."):
        frame = frame.f_back
    return frame
