"""Compares the first step after a restart with the same step before it.

State that a script keeps in plain variables, caches, hooks and files is in no commit. Under a launcher that restarts
all processes, no process is left that has it and could be compared (`shadow_step`). So rank 0 stores the sums of its
own gradients in the first step after a commit beside that commit. After a restart, rank 0 of a world of the same size
computes that step from the same state, samples and random numbers. If the gradients differ, the step reads something
that a new process does not have, and the run is refused (ADR 0021). The same holds if an optimizer's settings, or the
gradients that it is given, differ when it steps (`optimizer_updates`).

Some steps differ each time they are computed (an augmentation with its own generator). This shows in the second
restart, when the two new processes differ from each other too. Then the run goes on, with a warning.

A launcher may start a run again that was refused because a new process computed otherwise than a survivor. The new
processes are then all alike, also where they lack what the survivor had, and the step behind the commit may come
before the one that shows it. So the refusal itself is a note: it lies below the checkpoint URL. A start from a commit
that is no newer is refused again, unless the program was changed or its first step is another than the noted one.

Invariants: nothing here waits longer than the store's timeout. A run is not refused if its script or its arguments have
changed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from everstep.contract.stamp import WRITTEN, other_file, unchanged
from everstep.recovery.errors import LoopError
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.guards.comparison.local_gradients import LocalGradients, pack, unpack
from everstep.train.guards.comparison.optimizer_updates import OptimizerUpdates
from everstep.train.guards.comparison.rehearsed import files_of_arguments, program
from everstep.train.guards.plain_values import Values, differences, listed, remedy, untracked_values
from everstep.train.guards.script_objects import Name

log = logging.getLogger("everstep.train")

NEXT: Final = "next-step"  # the attachment by the process that saved
AGAIN: Final = "next-step-again"  # by the first process that was refused
REFUSED: Final = "refused/new-process.json"  # below the checkpoint URL; see `RestartCheck.note_refusal`
MOST_BYTES, MOST_TEXT = 2**16, 8000  # of it, and characters of the refusal in it


class RestartCheck:
    """The check in one process. `hears`: it is told of the step's collectives, and then leaves out sums that depend on
    other ranks' values. `may_differ`: whether a value of this name may differ between processes. `carried`: the names
    that the loop carries and that are not tracked."""

    def __init__(
        self, state: Mapping[str, Any], coordinator: StepCoordinator, may_differ: Callable[[str], bool],
        carried: Mapping[str, Name], *, hears: bool,
    ) -> None:  # fmt: skip
        self._may_differ, self._carried = may_differ, carried
        self._state = state
        self._coordinator = coordinator
        self._hears = hears
        self._program: str | None = None  # None: not computed yet, or unknown
        self._files = files_of_arguments(sys.argv[1:])  # when this process began; those that it writes are no part
        self._gradients: LocalGradients | None = None
        self._sums: torch.Tensor | None = None
        self._updates: OptimizerUpdates | None = None
        self._values: Values = {}
        self._size = self._step = 0
        self._restored: int | None = None  # the step of the commit from which this process began

    def begin(self, rank: int, world_size: int) -> None:
        """Begin a step that this process takes as itself."""
        self._forget()
        schedule, step = self._coordinator.schedule, self._coordinator.step
        if schedule is None or rank != 0:
            return
        if schedule.restored_step == step:
            self._restored = step
        if step not in (self._restored, schedule.saved_step):
            return
        if self._program is None:
            self._program = program()
        self._size, self._step = world_size, step
        self._values = untracked_values(sys._getframe(1), self._state, self._carried)
        self._gradients = LocalGradients(self._state)
        self._updates = OptimizerUpdates(self._state, self._gradients)
        self._gradients.begin()

    def collective(self, name: str) -> None:
        """Note that a collective of the program begins in a step."""
        if self._gradients is not None:
            self._gradients.collective(name)

    def update(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Look at an optimizer before its step. With a `closure` the step has yet to compute gradients."""
        if not closure and self._updates is not None:
            self.over()
            self._updates.begins(optimizer)

    def over(self) -> None:
        """End the comparison: the step's block has ended, or its first optimizer steps."""
        if self._gradients is not None and self._sums is None:
            self._gradients.end()
            self._sums = self._gradients.totals()

    def completed(self) -> None:
        """Compare the completed step, before anything is saved. Raises `LoopError` on rank 0."""
        if self._sums is not None:
            if self._step == self._restored:
                self._compare(self._sums)
            elif (schedule := self._coordinator.schedule) is not None:
                schedule.attach(NEXT, pack(self._sums, self._head()))
        self._forget()

    def note(self) -> None:
        """Store the sums of a step that is begun but not made, before the process leaves."""
        self.over()
        schedule = self._coordinator.schedule
        if self._sums is not None and schedule is not None and schedule.saved_step == self._step:
            schedule.attach_now(NEXT, pack(self._sums, self._head()))
        self._forget()

    def _head(self) -> dict[str, Any]:
        return {
            "version": 2,
            "world_size": self._size,
            "hears": self._hears,
            "program": self._program,
            "files": self._lasting_files(),
            "kernels": kernels(),
            "names": self._gradients.names if self._gradients is not None else [],
            "values": self._values,
            "updates": self._updates.noted() if self._updates is not None else None,
        }

    def _lasting_files(self) -> dict[str, str]:
        return unchanged([self._files, files_of_arguments(sys.argv[1:])])

    def _is_of_program(self, note: Mapping[str, Any]) -> bool:
        """Whether the program that has made the note is this one."""
        same = self._program is not None and note.get("program") == self._program
        return same and other_file(note.get("files", {}), self._files) is None

    def _compare(self, sums: torch.Tensor) -> None:
        schedule = self._coordinator.schedule
        assert schedule is not None
        notes = {name: note for name, data in schedule.attached((NEXT, AGAIN)).items() if (note := _unpacked(data))}
        if NEXT not in notes:
            self._refuse_again("behind which no step is noted that could show whether the script was mended")
            log.warning("the first step after this restart is not compared: none is noted behind the commit")
            return
        theirs, head = notes[NEXT]
        differing = differences(head["values"], self._values, self._may_differ)
        is_same = self._is_of_program(head)
        self._files |= {number: WRITTEN for number, digest in head.get("files", {}).items() if digest == WRITTEN}
        if head["world_size"] != self._size or head["hears"] != self._hears:
            self._refuse_again("whose next step is noted for a world of another size")
            log.warning("the gradients of the first step after this restart are not compared: the world had %s ranks, "
                        "and has %s", head["world_size"], self._size)  # fmt: skip
            if differing:
                log.warning("of the script's variables these are not those of the run before this restart: %s. %s",
                            listed(differing), remedy(differing))  # fmt: skip
            return
        alike = head.get("kernels") == kernels()
        difference = self._difference(sums, theirs, head, alike)
        if not difference:
            self._refuse_again("and its first step is like the noted one, which came before that refusal")
            if differing:
                log.warning(
                    "this restart has the gradients of the run before it. Of the script's variables these differ: %s; "
                    "track those that later steps read", listed(differing),
                )  # fmt: skip
            return
        text = refusal(difference, self._step, differing)
        if not is_same:
            log.warning("%s. The run goes on, because the script or its arguments were changed since", text)
            return
        if AGAIN in notes and self._difference(sums, *notes[AGAIN], alike):
            log.warning(
                "step %d has another result each time it is computed from the same samples, random numbers and "
                "tracked state: it %s. So it cannot be compared, and the run goes on, but does not end as an "
                "undisturbed run would. For equal results draw random numbers only from torch's, numpy's or Python's "
                "own generators, or from one that is tracked", self._step, difference,
            )  # fmt: skip
            return
        if AGAIN not in notes:
            schedule.attach_to_restored(AGAIN, pack(sums, self._head()))
        # The next process may find that each one computes another step: a restart may help, once.
        raise LoopError(text, certain=AGAIN in notes)

    def note_refusal(self, text: str) -> None:
        """Note for the processes that may be started again that a new one was refused as `text` says. By rank 0."""
        if (schedule := self._coordinator.schedule) is None or (own := self._program or program()) is None:
            return
        note = {
            "version": 1, "step": self._coordinator.step, "program": own, "files": self._lasting_files(),
            "refusal": text[:MOST_TEXT],
        }  # fmt: skip
        schedule.put_beside(REFUSED, json.dumps(note).encode())

    def _refuse_again(self, why: str) -> None:
        """Raise `LoopError` if this very program was refused behind the restored commit. What a survivor had then is
        lost, so nothing could be compared but processes that all lack it. `why` the first step does not show it."""
        schedule = self._coordinator.schedule
        assert schedule is not None
        data = schedule.beside(REFUSED, MOST_BYTES)
        if data is None:
            return
        try:
            note = json.loads(data)
            step, text, is_same = int(note["step"]), str(note["refusal"]), self._is_of_program(note)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            log.warning("%s cannot be read: %s", REFUSED, e)
            return
        if is_same and step >= self._step:
            raise LoopError(
                f"{text}. That was the refusal at step {step}. This start goes on from the commit of step "
                f"{self._step}, {why}. Change the script as this says; if the difference is intended, write "
                "everstep.start(…, compare_gradients=False)"
            )

    def _difference(self, sums: torch.Tensor, theirs: torch.Tensor, head: Mapping[str, Any], alike: bool) -> str:
        """How the step differs from the noted one; nothing if it is the same."""
        assert self._gradients is not None
        assert self._updates is not None
        if (name := self._gradients.first_difference(sums, theirs, alike=alike)) is not None:
            return f"computes other gradients than before: {name} has others"
        update = self._updates.difference(head.get("updates"), alike=alike)
        return f"moves the parameters otherwise than before: {update}" if update is not None else ""

    def _forget(self) -> None:
        if self._gradients is not None:
            self._gradients.end()
        self._gradients, self._updates, self._sums, self._values = None, None, None, {}


@functools.cache
def kernels() -> str:
    """The properties on which the bits of a sum depend: the kind of machine, the number of threads, torch's version."""
    model = "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{torch.__version__} {model} {torch.get_num_threads()} threads {device}"


def _unpacked(data: bytes) -> tuple[torch.Tensor, dict[str, Any]] | None:
    try:
        sums, head = unpack(data)
    except (ValueError, TypeError) as e:
        log.warning("this restart is not compared: the note of the step after the commit cannot be read: %s", e)
        return None
    usable = sums is not None and head.get("version") == 2 and isinstance(head.get("values"), dict)
    usable = usable and isinstance(head.get("files", {}), dict)
    return (sums, head) if sums is not None and usable else None


def refusal(difference: str, step: int, differing: list[str]) -> str:
    """What is said of a step that is not the one noted behind the commit of `step`."""
    text = (
        f"the run was started again from the commit of step {step}, and from the same samples, random numbers and "
        f"tracked state the step after it {difference}. So the step reads something that a new process does not have. "
        "Nothing was saved since"
    )
    if differing:
        text += f". Of the script's variables these differ: {listed(differing)}"
    return (
        f"{text}. {remedy(differing)}. If the difference is intended (a configuration file or data were changed), "
        "write everstep.start(…, compare_gradients=False)"
    )
