"""In a training process of a rehearsal: notes each step, kills the process where the plan says, ends the run early.

It stands between the script and the session, at what is public of it, and changes nothing that either computes. The
script's checkpoint URL is replaced by a folder of the rehearsal, so that a real run's commits are neither read nor
touched.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import optimizer as optimizers

import everstep
from everstep.checkpoint import Catalog, Checkpointer
from everstep.checkpoint.log import opening
from everstep.checkpoint.state.modules import bare
from everstep.recovery.current_round import CurrentRound
from everstep.rehearse import heap
from everstep.rehearse.begun_anew import FILE
from everstep.rehearse.cache_counts import CacheCounts
from everstep.rehearse.draws import Draws
from everstep.rehearse.elsewhere import elsewhere, set_on_objects
from everstep.rehearse.held_tensors import held_tensors
from everstep.rehearse.idle_indices import idle_indices
from everstep.rehearse.not_read import NotRead
from everstep.rehearse.plan import EVALUATION, POINTS, Kill, LiveChange
from everstep.rehearse.record import CHANGE_WANTED, EVALUATED, OWN, Record, write_whole
from everstep.rehearse.saves import Saves
from everstep.rehearse.tracked_values import digests
from everstep.storage import open_store
from everstep.train import between_steps, session
from everstep.train import step as steps
from everstep.train.coordination.step_agreement import StepAgreement, StepRequest
from everstep.train.guards import left_state
from everstep.train.guards.comparison import rehearsed
from everstep.train.guards.comparison.restart_check import NEXT
from everstep.train.guards.plain_values import Roots, plain_values
from everstep.train.guards.script_objects import NamedValue, is_own
from everstep.train.nested_loops import NestedLoops
from everstep.train.worlds import RESERVED

COMMIT_SECONDS = 60.0
CHANGE_WAITS = 3.0  # as long as for so many saves: a rank that joins begins the script meanwhile


class Watch:
    """Of one process. `every`: steps between two saves, where the script's own number is too large to be rehearsed.
    `begins`: the step of the commit from which the run begins; steps are counted from there. `change`: a change of size
    that is to come."""

    def __init__(
        self, folder: Path, kills: list[Kill], limit: int, every: int, begins: int | None, saves: Saves,
        change: LiveChange | None = None, heap_behind: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._heap = frozenset(heap_behind)
        self.folder, self.limit, self.every, self.saves = folder, limit, every, saves
        self._change = change
        self._round: CurrentRound | None = None
        self._moves = False  # all ranks change rounds at the end of this step
        self.begins, self.base = begins, begins or 0
        self._url: str | None = None  # the first that the script names
        # Of several ranks that die at once, a launcher may end some before they come to their own death.
        self._kills = [kill for kill in kills if not any(folder.glob(f"killed-{kill.name}-*"))]
        self.tracked: dict[str, Any] = {}
        self.samples: list[str] = []
        self.position = 0
        self.indices: list[str] = []  # the names that loops of the script's give the numbers of `enumerate`
        self._points: Counter[str] = Counter()
        self.step: int | None = None  # the number of the step that runs
        self._rank = 0
        self.run: session.Run | None = None  # that steps are taken in
        self.is_cut = False  # the script's loop has more steps than are rehearsed
        self.in_library = False  # steps are Trainer's or Lightning's. With neither, the script's loop is its own
        self.by_commits = False  # the script's own loop goes back to commits in memory, which are saved when due
        self.on_enter: list[Callable[[int, int], None]] = []  # the step after so many begins, on a rank
        self.on_backward: Callable[[], None] = lambda: None  # the script calls `backward`
        self._of_libraries: list[str] = []  # see `kept_by_loaders`
        self.on_evaluation: list[Callable[[bool], None]] = []  # one begins (True); it is lost, and comes again (False)
        self.draws = Draws()
        self._out = (folder / f"records-{os.getpid()}.jsonl").open("a")

    def install(self) -> None:
        """Wrap the session's public functions, in this process."""
        self._wrap_run()
        self._wrap_step()
        self._wrap_evaluations()
        if self._change is not None:
            self._wrap_rounds()
        optimizers.register_optimizer_step_pre_hook(lambda *_: self.reach("gradients"))
        optimizers.register_optimizer_step_post_hook(lambda *_: self.reach("optimizer"))

    def _wrap_run(self) -> None:
        start = session.start
        loop, loop_over_epochs = session.Run._steps, session.Run._epochs
        make = Checkpointer.__init__
        watch = self

        def started(checkpoint: Any = None, *, every_steps: int | None = None, **options: Any) -> session.Run:
            ours = checkpoint if isinstance(checkpoint, Checkpointer) else watch.place(checkpoint)
            options.pop("every_seconds", None)
            return start(ours, every_steps=watch._cadence(every_steps), **options)

        def made(checkpointer: Checkpointer, url: Any = None, **options: Any) -> None:
            if options.get("store") is None:
                url = watch.place(url)
            options["every_seconds"] = None
            options["every_steps"] = watch._cadence(options.get("every_steps"))
            make(checkpointer, url, **options)

        def stepping(run: session.Run, loader: Any, until: int | None, epochs: int | None) -> Iterator[steps.Step]:
            watch.run = run
            watch.is_cut = until is None or until > watch.base + watch.limit
            if until is not None:
                until = min(until, watch.base + watch.limit)
            for step in loop(run, loader, until, epochs):
                yield step
                if step.phase is steps.Phase.DONE:
                    watch.tracked = {name: value for name, value in run._state.items() if name not in RESERVED}
                    watch.note(run.step - watch.base, run._rank, sys._getframe(1))
                if until is None and watch.ends(run):
                    return

        def over_epochs(run: session.Run, loader: Any, epochs: int) -> Iterator[int]:
            watch.run = run
            for epoch in loop_over_epochs(run, loader, epochs):
                yield epoch
                if watch.ends(run):
                    return

        left: Any = NestedLoops.steps_left

        def steps_left(nesting: NestedLoops) -> bool:
            # Also in a process that comes when the others have enough, in the middle of an epoch.
            return left.fget(nesting) and not (watch.run is not None and watch._has_enough(watch.run))

        # The session reads the text of the loop that asks for a step: the script's, and not this one.
        for function in (stepping, over_epochs):
            function.__code__ = function.__code__.replace(co_filename=session.__file__)

        replace_all(
            (everstep, "start", started), (session, "start", started), (Checkpointer, "__init__", made),
            (session.Run, "_steps", stepping), (session.Run, "_epochs", over_epochs),
            (NestedLoops, "steps_left", property(steps_left)),
            (rehearsed, "look_up", lambda _: None),  # what is proved anew is not left out
            (opening, "compare_url", lambda *_: None),  # each URL is replaced here
        )  # fmt: skip

    def ends(self, run: session.Run) -> bool:
        """Whether the rehearsal has enough steps. They are then all that the run has: a process that is lost between
        here and the run's end is replaced as behind the last step, and not as in a loop that was left early."""
        if not self._has_enough(run):
            return False
        run._goal = run.step
        return True

    def _has_enough(self, run: session.Run) -> bool:
        return run.step >= self.base + self.limit

    def _wrap_step(self) -> None:
        enter, leave, take = steps.Step.__enter__, steps.Step.__exit__, steps.Step._take
        backward: Any = torch.Tensor.backward
        of_loss, of_losses = torch.autograd.grad, torch.autograd.backward
        watch, in_backward = self, [False]

        def entered(step: steps.Step) -> Any:
            watch.samples = []
            batch = enter(step)
            watch.enters(step.number - watch.base, watch.run._rank if watch.run is not None else 0)
            watch.draws.begin(step, watch.run, world_size())
            return batch

        def left(step: steps.Step, *error: Any) -> bool:
            if error[0] is None:
                watch.draws.end()
                watch.reach("tail")
            handled = leave(step, *error)
            if step.phase is steps.Phase.DONE:
                watch.leaves()
            return handled

        def taken(step: steps.Step) -> Any:
            batch = take(step)
            watch.samples += samples(batch)
            return batch

        def differentiated(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
            watch.on_backward()
            watch.draws.differentiate(loss)
            if loss.requires_grad:
                at_loss: Any = loss
                hooks: list[Any] = []

                def begins(_: Any) -> None:
                    hooks.pop().remove()
                    watch.reach("backward")

                hooks.append(at_loss.register_hook(begins))
            in_backward[0] = True
            try:
                backward(loss, *arguments, **options)
            finally:
                in_backward[0] = False

        def differentiating(function: Any) -> Any:
            """The functions of torch.autograd, one of which `Tensor.backward` calls."""

            @functools.wraps(function)
            def called(*arguments: Any, **options: Any) -> Any:
                if not in_backward[0]:
                    watch.on_backward()
                    watch.draws.differentiate(next(iter((*arguments, *options.values()))))
                    watch.reach("backward")
                return function(*arguments, **options)

            return called

        replace_all(
            (steps.Step, "__enter__", entered), (steps.Step, "__exit__", left), (steps.Step, "_take", taken),
            (torch.Tensor, "backward", differentiated), (torch.autograd, "grad", differentiating(of_loss)),
            (torch.autograd, "backward", differentiating(of_losses)),
        )  # fmt: skip

    def _wrap_evaluations(self) -> None:
        call, watch = between_steps.BetweenSteps.call, self

        def called(between: Any, functions: Iterable[Callable[[], Any]], coordinator: Any, *rest: Any) -> None:
            step = coordinator.step - watch.base
            for noted in watch.on_evaluation:
                noted(True)
            try:
                call(between, [functools.partial(watch._evaluate, one, step) for one in functions], coordinator, *rest)
            except BaseException:
                for noted in watch.on_evaluation:
                    noted(False)
                raise

        replace_all((between_steps.BetweenSteps, "call", called))

    def _evaluate(self, function: Callable[[], Any], step: int) -> Any:
        """Call a function that evaluates, and note its forward passes of tracked modules. Before the second one the
        other ranks have added something to their metrics."""
        run, rank = self.run, self.run._rank if self.run is not None else 0
        kills = {kill.point: kill for kill in self._kills if kill.step == step and rank in kill.ranks}
        models = {id(bare(one)) for one in run._state.values() if isinstance(one, torch.nn.Module)} if run else set()
        passes = [0]

        def begins(module: torch.nn.Module, _: Any) -> None:
            passes[0] += id(module) in models
            if passes[0] == 2 and "evaluate" in kills:
                self._die(kills["evaluate"], rank)

        def ends(module: torch.nn.Module, *_: Any) -> None:
            if id(module) in models and "forward" in kills:
                self._die(kills["forward"], rank)

        hooks = register_module_forward_pre_hook(begins), register_module_forward_hook(ends)
        try:
            result = function()
        finally:
            for hook in hooks:
                hook.remove()
        for point in EVALUATION & kills.keys():
            self._die(kills[point], rank)
        (self.folder / f"{EVALUATED}{step}-{passes[0]}").touch()
        return result

    def _wrap_rounds(self) -> None:
        listen, at_boundary, watch = CurrentRound.listen, StepAgreement.at_boundary, self

        def listens(current: CurrentRound, *arguments: Any) -> None:
            watch._round = current
            listen(current, *arguments)

        def agreed(agreement: StepAgreement, wish: StepRequest) -> StepRequest:
            request = at_boundary(agreement, wish)
            if not watch._moves:
                return request
            watch._moves = False
            return replace(request, move=True)  # a step or more later all would agree on it by themselves

        replace_all((CurrentRound, "listen", listens), (StepAgreement, "at_boundary", agreed))

    def _wait_for_change(self) -> None:
        """Until this process knows of the round with another number of ranks, or that it leaves: then all ranks change
        rounds at the end of this step, when it is saved."""
        current = self._round
        if current is None or self._change is None or world_size() == self._change.size:
            return
        (self.folder / CHANGE_WANTED).touch()
        self._moves = self.saves.at_once = self.saves.wait_for(
            lambda: current.boundary_wanted or current._announcements.drained, CHANGE_WAITS
        )

    def _cadence(self, own: int | None) -> int:
        """Steps between two saves: the script's own number, if there is a commit before all are killed."""
        return own if own is not None and own < self.limit // 2 else self.every

    def place(self, url: Any) -> str:
        """The folder of the rehearsal that stands for a checkpoint URL of the script."""
        if url is None or str(url).startswith(str(self.folder)):
            return str(url or self.folder / "commits")
        self._url = self._url or str(url)
        if self.begins is not None and str(url) == self._url:
            return str(self.folder / "commits")  # where the commit is from which the run begins
        return str(self.folder / f"commits-{hashlib.blake2b(str(url).encode(), digest_size=4).hexdigest()}")

    def enters(self, step: int, rank: int) -> None:
        """The step after so many begins. Raises `SystemExit` if the run did not begin from its commit."""
        if step < 0:
            self.did_not_begin()
        self.step, self._rank = step, rank
        self._points.clear()
        for entered in self.on_enter:
            entered(step, rank)
        self.reach("begin")

    def did_not_begin(self) -> NoReturn:
        raise SystemExit(
            f"everstep rehearse: the script did not restore the commit of step {self.begins}, which --from names. It "
            "has to save by everstep.start or an everstep.Checkpointer, and the commit counts for its first URL"
        )

    def leaves(self) -> None:
        """The step has been counted."""
        self.reach("between")
        self.step = None

    def note(
        self, step: int, rank: int, frame: FrameType | None, own: Iterable[tuple[str, Any]] = (),
        *, closed: Iterable[object] = (),
    ) -> None:  # fmt: skip
        """So many steps are complete: what this process has now. `own`, `closed`: see `Roots`."""
        beyond = list[str]()
        state = {**(self.run._state if self.run is not None else {}), **self.tracked}
        roots = Roots(frame, state, own, closed, elsewhere(frame, beyond), lambda: set_on_objects(frame))
        values, unread = self._held(roots, frame, beyond)
        tracked, raising = digests(self.tracked)
        if self._heap & {step, step + 1}:
            file = self.folder / FILE.format(step=step, rank=rank)
            write_whole(file, json.dumps(heap.read(roots, frame, beyond, unread)))
        record = Record(
            step, rank, world_size(), os.getpid(), time.time(), tracked, values, sorted(self.samples),
            [*beyond, *raising], self.position, self.indices,
            [*(self.run._untracked if self.run is not None else ()), *self._of_libraries], unread,
            self.draws.drawn, self.draws.losses,
        )  # fmt: skip
        self._out.write(record.line())
        self._out.flush()

    def _held(self, roots: Roots, frame: FrameType | None, beyond: list[str]) -> tuple[dict[str, str], list[str]]:
        """The script's own values, but for those of what is tracked; and the names of what cannot be read. `beyond`
        gets those of what is too much to be read."""
        not_read, caches = NotRead(), CacheCounts()

        def look(named: NamedValue) -> None:
            not_read.look(named)
            caches.look(named)

        self._of_libraries = kept_by_loaders(roots.values)
        values = plain_values(roots, beyond, look)
        try:
            tensors, unread = held_tensors(roots)
        except Exception as e:  # the script's own classes may raise anything
            tensors, unread = {}, [f"tensors of the script's own ({type(e).__name__}: {e})"]
        found = {**values, **caches.values(roots), **settings_of(self.tracked), **tensors}
        # Another run may read what is unread: what is too much is so beside the others.
        left_out = {*unread, *idle_indices(frame)}
        beyond += unread
        return {name: text for name, text in found.items() if name not in left_out}, not_read.names(roots)

    def reach(self, point: str) -> None:
        """This process is at a point of its step. The last one stands for those to which the step has not come: without
        an optimizer none steps."""
        self._points[point] += 1
        if self.step is None or self._points[point] > 1:
            return
        points = {point} if point != "between" else {point, *(set(POINTS) - self._points.keys() - EVALUATION)}
        if self._change is not None and (point, self.step + 1) == ("tail", self._change.step):
            self._wait_for_change()
        for kill in self._kills:
            if kill.step == self.step and kill.point in points and self._rank in kill.ranks:
                self._die(kill, self._rank)

    def _die(self, kill: Kill, rank: int) -> None:
        marker = self.folder / f"killed-{kill.name}-{rank}"
        with contextlib.suppress(FileExistsError):
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            self.saves.wait()
            if len(kill.ranks) > 1 and kill.step > self.every:
                self._wait_for_commit()
            if self.run is None and not (self.in_library or self.by_commits):
                (self.folder / OWN).touch()
            marker.write_text("it dies")  # a run of several sizes is ended where all are about to die, and not before
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_commit(self) -> None:
        """Several ranks die at once. Where no rank that is left has the whole state, all begin from the newest commit;
        without one they would begin from nothing, and nothing could be lost. What rank 0 notes of the step behind a
        commit comes later than the commit, from a thread of its own. A loop of the script's own that has saved nothing
        is not waited for."""
        deadline = time.monotonic() + COMMIT_SECONDS
        # Behind a change of size nothing is noted of the next step, and a start with another size compares nothing.
        compared = self.run is not None and self.run._comparable and self._change is None
        # Else the script decides what it saves, and when.
        is_due = self.run is not None or self.in_library or self.by_commits
        while True:
            folders = [place for place in self.folder.glob("commits*") if any(place.glob("data/*"))]
            newest = [Catalog(open_store(str(place))).latest() for place in folders]
            saved = any(one is not None and (self.begins is None or one.step > self.begins) for one in newest)
            noted = not compared or any(any(place.glob(f"data/*/{NEXT}.bin")) for place in folders)
            if (saved and noted) or not (folders or is_due) or time.monotonic() > deadline:
                return
            time.sleep(0.01)


def rank() -> int:
    """Of this process, in the present world."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Of the present world."""
    return dist.get_world_size() if dist.is_initialized() else 1


def replace_all(*wrapped: tuple[Any, str, Any]) -> None:
    for owner, name, ours in wrapped:
        setattr(owner, name, ours)


def kept_by_loaders(values: Mapping[str, Any]) -> list[str]:
    """The names of what libraries keep in their own loaders, such as `eval_dataloader.iteration` of Accelerate's: a new
    process counts anew, and no script can track it. What the script sets on such a loader is not among them."""
    return [
        f"{name}.{key}" for name, loader in values.items()
        if isinstance(loader, torch.utils.data.DataLoader) and not is_own(type(loader))
        for key in sorted(vars(loader).keys() & _mentioned(type(loader)))
    ]  # fmt: skip


def _mentioned(kind: type) -> frozenset[str]:
    """The names of attributes in the methods of a class."""
    methods = [one for base in kind.__mro__ for one in vars(base).values() if isinstance(one, FunctionType)]
    return frozenset(name for one in methods for name in one.__code__.co_names)


def settings_of(tracked: Mapping[str, Any]) -> dict[str, str]:
    """The numbers among the settings of tracked optimizers: learning rates and the like."""
    return {
        f"{name}.param_groups[{i}][{key!r}]": repr(value)
        for name, one in tracked.items() if isinstance(one, torch.optim.Optimizer)
        for i, group in enumerate(one.param_groups)
        for key, value in group.items() if type(value) in (int, float)
    }  # fmt: skip


def samples(batch: Any) -> list[str]:
    """A digest of each sample of a batch: of the rows of its tensors. Nothing where it has no tensors."""
    tensors = list(_tensors(getattr(batch, "data", batch)))
    lengths = {len(t) for t in tensors if t.dim() > 0}
    if len(lengths) != 1 or any(t.dim() == 0 for t in tensors):
        return []
    found = []
    for i in range(lengths.pop()):
        one = hashlib.blake2b(digest_size=8)
        for t in tensors:
            one.update(left_state.digest(t[i]).encode())
        found.append(one.hexdigest())
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
