"""Runs an ordinary script as `python script.py` would, and does three things that the script does not know of.

    everstep-run … ordinary_driver.py SCRIPT

It ends this process with SIGKILL if it is rank 1 at the point of the step that `ORDINARY_KILL` names ("5:backward";
`POINTS`), once in a job. And when the script has ended it writes what the run has made, for the test to compare: what
was tracked; the modules, optimizers, schedules, scalers and parameters among the script's variables, tracked or not.
`ORDINARY_PATIENCE`: seconds after which ranks that wait at the end of a step, or of the loop, give the others up.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from everstep.train import early_exit, session
from everstep.train import step as steps
from everstep.train.coordination.group_shutdown import hold_group
from everstep.train.guards.comparison.restart_check import NEXT

# Where in its step a rank dies; "backward2" is in the step's second backward pass, and so on.
#   begin       the block has begun             backward    the loss is being differentiated, nothing is averaged yet
#   gradients   an optimizer is about to step   optimizer   it has stepped
#   tail        the block has ended             between     the step has been counted
#   evaluate    a function of run.evaluate begins, after so many steps (evaluate2: the second one there)
#   evaluated   such a function has returned       once     a function of run.once begins (its step is 0)
POINTS = re.compile(r"(begin|backward|gradients|optimizer|tail|between|evaluated?|once)\d*")
VICTIM = 1
SAVED = 4  # steps, when the scripts save for the first time
COMMIT_SECONDS = 30.0
DEEPEST = 3  # of the script's own objects in each other


class Killer:
    """`wanted` is "STEP:POINT" of rank 1, "0@STEP:POINT" of another, "0+1@STEP:POINT" of two at once; or several of
    these, with commas. `STEP` steps are complete before the one that is struck."""

    def __init__(self, wanted: str, folder: Path) -> None:
        self._folder = folder
        self._wanted = list[tuple[set[int], str, str]]()
        for one in filter(None, wanted.split(",")):
            ranks, _, place = one.rpartition("@")
            step, _, point = place.partition(":")
            assert POINTS.fullmatch(point), wanted
            self._wanted.append(({int(r) for r in ranks.split("+")} if ranks else {VICTIM}, step, point))
        self._now: int | None = None
        self._passed: Counter[str] = Counter()

    def enter(self, number: int) -> None:
        self.at(number)
        self.reach("begin")

    def at(self, number: int) -> None:
        if self._now != number:
            self._passed.clear()
        self._now = number

    def leave(self) -> None:
        self.reach("between")
        self._passed.clear()
        self._now = None

    def backward(self, loss: torch.Tensor) -> None:
        if loss.requires_grad:
            hook = loss.register_hook(lambda _: (self.reach("backward"), hook.remove())[1])  # type: ignore[has-type]

    def reach(self, point: str) -> None:
        self._passed[point] += 1
        count = self._passed[point]
        if self._now is None and not self._wanted:
            return  # a script may be asked here what it must not ask itself
        here = session.current()._rank if session._started else 0  # as nobody who asks: that is a thing of its own
        for i, (ranks, step, wanted) in enumerate(self._wanted):
            if here in ranks and str(self._now) == step and wanted in {f"{point}{count}", point * (count == 1)}:
                self._die(self._folder / f"killed-{i}-{here}", int(step))

    def _die(self, marker: Path, step: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            (self._folder / "killed").touch()
            if step > SAVED:
                wait_for_commit(self._folder / "commits")
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_commit(folder: Path) -> None:
    """Else a launcher that starts all again has nothing to go back to but the beginning, where nothing can be lost."""
    deadline = time.monotonic() + COMMIT_SECONDS
    while Catalog(open_store(str(folder))).latest() is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing was committed to {folder} in {COMMIT_SECONDS} s")
        time.sleep(0.01)
    # What rank 0 notes of the step behind it comes later, from a thread of its own.
    while session.current()._comparable and not any(folder.glob(f"data/*/{NEXT}.bin")):
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing was noted beside the commit in {folder} in {COMMIT_SECONDS} s")
        time.sleep(0.01)


class Findings:
    """What of the run is compared at its end."""

    def __init__(self, script: ModuleType) -> None:
        self._script = script
        self._tracked: dict[str, Any] = {}
        self._frames: dict[CodeType, FrameType] = {}
        self.step, self.rank, self.world = -1, -1, -1

    def track(self, objects: dict[str, Any]) -> None:
        self._tracked |= objects

    def look(self, run: session.Run) -> None:
        """Between two steps: the script's variables of now are looked at when it has ended."""
        self.where(run)
        Path(f"{os.getpid()}.began").touch()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._script.__file__ and frame.f_code.co_name != "<module>":
                self._frames[frame.f_code] = frame
            frame = frame.f_back

    def where(self, run: session.Run) -> None:
        self.step = run.step
        if dist.is_initialized():
            self.rank, self.world = run._rank, dist.get_world_size()

    def write(self, folder: Path) -> None:
        found = {f"tracked {name}": content(value) for name, value in self._tracked.items()}
        for name, value in self._variables():
            if (held := content(value, tracked=False)) is not None:
                found[name] = held
        told = {"step": self.step, "rank": self.rank, "world": self.world, "pid": os.getpid(), "found": found}
        torch.save(told, folder / f"{os.getpid()}.tmp")
        os.rename(folder / f"{os.getpid()}.tmp", folder / f"{os.getpid()}.pt")

    def _variables(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        yield from self._in(self._script.__dict__, "", 0, seen)
        for code, frame in self._frames.items():
            yield from self._in(frame.f_locals, f"{code.co_name}.", 0, seen)

    def _in(self, names: dict[str, Any], prefix: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
        for name, value in list(names.items()):
            if name.startswith("__") or id(value) in seen or isinstance(value, type | ModuleType):
                continue
            seen.add(id(value))
            yield f"{prefix}{name}", value
            of_script = type(value).__module__ == "__main__" and not isinstance(value, torch.nn.Module)
            if of_script and depth < DEEPEST:
                yield from self._in(getattr(value, "__dict__", {}), f"{prefix}{name}.", depth + 1, seen)
            elif isinstance(value, list | tuple) and depth < DEEPEST:
                inside = {str(i): one for i, one in enumerate(value[:64]) if not isinstance(one, int | float | str)}
                yield from self._in(inside, f"{prefix}{name}.", depth + 1, seen)


def content(value: Any, *, tracked: bool = True) -> Any:
    """What of a value must be the same at the end; None if it may be anything."""
    if isinstance(value, torch.nn.Module):
        tensors = itertools.chain(value.named_parameters(), value.named_buffers())
        return {name.removeprefix("module."): here(t.detach()).clone() for name, t in tensors}
    schedule = torch.optim.lr_scheduler.LRScheduler
    if isinstance(value, torch.optim.Optimizer | schedule | torch.amp.GradScaler):
        return here(value.state_dict())
    if isinstance(value, torch.Tensor) and (tracked or isinstance(value, torch.nn.Parameter)):
        return value.detach().clone()
    if tracked:
        return value.state_dict() if hasattr(value, "state_dict") else value
    return None


def here(value: Any) -> Any:
    """What this process holds of it, where it is cut over processes."""
    if isinstance(value, dict):
        return {key: here(one) for key, one in value.items()}
    return value.to_local() if hasattr(value, "placements") else value


def install(findings: Findings, killer: Killer) -> None:
    """Between the script and the session, at what is public of it."""
    track, loop, close = session.Run.track, session.Run._steps, session.Run.close
    enter, leave, backward = steps.Step.__enter__, steps.Step.__exit__, torch.Tensor.backward
    once, evaluate = session.Run.once, session.Run.evaluate
    destroy = dist.destroy_process_group

    def tracked(run: session.Run, **objects: Any) -> None:
        track(run, **objects)
        findings.track(objects)

    def stepping(run: session.Run, *arguments: Any, **options: Any) -> Iterator[steps.Step]:
        for step in loop(run, *arguments, **options):
            findings.look(run)
            yield step
        findings.look(run)

    # The session reads the text of the loop that asks for a step: the script's, and not this one.
    stepping.__code__ = stepping.__code__.replace(co_filename=session.__file__)

    def closed(run: session.Run) -> None:
        findings.where(run)
        close(run)

    def entered(step: steps.Step) -> Any:
        batch = enter(step)
        killer.enter(step.number)
        return batch

    def left(step: steps.Step, *error: Any) -> bool:
        if error[0] is None:
            killer.reach("tail")
        handled = leave(step, *error)
        killer.leave()
        return handled

    def did_once(run: session.Run, fn: Any, **options: Any) -> Any:
        def called() -> Any:
            killer.at(0)
            killer.reach("once")
            return fn()

        return once(run, called, **options)

    def evaluating(run: session.Run, fn: Any, *arguments: Any, **options: Any) -> None:
        def called(*given: Any) -> Any:
            killer.at(run.step)
            killer.reach("evaluate")
            found = fn(*given)
            killer.reach("evaluated")
            return found

        evaluate(run, called, *arguments, **options)

    def differentiated(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        killer.backward(loss)
        backward(loss, *arguments, **options)

    def left_group(*arguments: Any, **options: Any) -> None:
        hold_group()  # for plain scripts, too
        destroy(*arguments, **options)

    session.Run.track, session.Run._steps, session.Run.close = tracked, stepping, closed  # type: ignore[method-assign]
    session.Run.once, session.Run.evaluate = did_once, evaluating  # type: ignore[method-assign]
    steps.Step.__enter__, steps.Step.__exit__ = entered, left  # type: ignore[method-assign]
    dist.destroy_process_group = left_group
    torch.Tensor.backward = differentiated  # type: ignore[method-assign]
    optimizers.register_optimizer_step_pre_hook(lambda *_: killer.reach("gradients"))
    optimizers.register_optimizer_step_post_hook(lambda *_: killer.reach("optimizer"))


def main() -> None:
    path = Path(sys.argv[1])
    folder = Path(os.environ["ORDINARY_FOLDER"])
    os.chdir(folder)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s.%(msecs)03d {os.getpid()} %(name)s %(message)s")
    script = ModuleType("__main__")
    script.__file__ = str(path)
    sys.modules["__main__"] = script
    sys.argv = [str(path)]
    sys.path[0] = str(path.parent)
    if patience := os.environ.get("ORDINARY_PATIENCE"):
        early_exit.LEAST_SECONDS = float(patience)
    findings = Findings(script)
    install(findings, Killer(os.environ.get("ORDINARY_KILL", ""), folder))
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), script.__dict__)
    except SystemExit as e:
        if e.code:
            raise
    if session._started:  # its end closes it
        findings.where(session._started[0])
    findings.write(folder)
    end()


def end() -> None:
    """As the interpreter ends, but for its taking apart of torch, which is most of what such a process costs."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
