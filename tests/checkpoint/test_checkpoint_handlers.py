"""A handler of signals saves, closes or waits in the middle of a save: after any line of it."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import Checkpointer, SaveHandle
from everstep.checkpoint.errors import CheckpointError, SaveFailed, SettingUnusable
from everstep.checkpoint.handle import Failed
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import MemoryStore

SECONDS = 60.0
# Also the library's own modules in which the main thread holds a lock that its handler might ask for.
TRACED = (str(Path(everstep.__file__).parent / "checkpoint"), "/queue.py", "/threading.py")


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((4,), float(step)), "b": torch.full((4,), float(step)), "step": step}


def step_of(state: Mapping[str, Any]) -> int:
    """Of which step the whole of it is."""
    (found,) = {*state["a"].tolist(), *state["b"].tolist(), float(state["step"])}
    return int(found)


@contextlib.contextmanager
def interrupted(after: int, handler: Callable[[], None]) -> Iterator[list[int]]:
    """Call `handler` once, after so many lines, as the interpreter calls one of signals. Gives the lines that ran."""
    lines = [0]

    def of_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == after:
                sys.settrace(None)
                handler()
        return of_line

    def of_call(frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        return of_line if file.startswith(TRACED[0]) or file.endswith(TRACED[1:]) else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def play(after: int, handle: Callable[[Checkpointer, list[SaveHandle]], None]) -> tuple[int, list[SaveHandle], Any]:
    """Save step 1, then step 2 with this handler in it. How many lines that took, its and the handler's saves, and the
    store."""
    store, made = MemoryStore("x"), list[SaveHandle]()
    checkpointer = Checkpointer(store=store, keep=10)
    checkpointer.restore(state_of(0))
    checkpointer.save(1, state_of(1)).wait(SECONDS)
    with interrupted(after, lambda: handle(checkpointer, made)) as lines, contextlib.suppress(SettingUnusable):
        made.append(checkpointer.save(2, state_of(2)))
    with contextlib.suppress(CheckpointError):
        checkpointer.close(SECONDS)
    return lines[0], made, store


def check(store: Any, handles: list[SaveHandle]) -> None:
    assert all(handle.done() for handle in handles), "a save has no outcome after close()"
    for found in Catalog(store).list():
        state = everstep.load(store=store, n=found.n, state=state_of(0)).state
        assert step_of(state) == found.step


@pytest.mark.long
@pytest.mark.parametrize("what", ["saves", "closes", "waits"])
@pytest.mark.timeout(300)
def test_handler_after_any_line_of_a_save_hangs_nothing_and_tears_nothing(what: str) -> None:
    def handle(checkpointer: Checkpointer, made: list[SaveHandle]) -> None:
        match what:
            case "saves":
                made.append(checkpointer.save(2, state_of(2)))
            case "closes":
                with contextlib.suppress(CheckpointError):
                    checkpointer.close(SECONDS)
            case _:
                assert checkpointer.wait(SECONDS)

    lines, after = play(0, handle)[0], 1
    assert lines > 100
    while after <= lines:
        _, made, store = play(after, handle)
        check(store, made)
        if what == "saves":
            assert everstep.load(store=store).step == 2, f"after line {after}"
        after += 1


class Interrupts:
    """An object of the state in whose `state_dict` a signal comes."""

    def __init__(self, handler: Callable[[], None]) -> None:
        self.handler: Callable[[], None] | None = handler

    def state_dict(self) -> dict[str, Any]:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_save_in_which_a_handler_has_saved_is_left_out_and_takes_no_later_place() -> None:
    """Else it would commit behind a save that has a later number, and a deletion would take it for one that failed."""
    store, inner = MemoryStore("x"), list[SaveHandle]()
    checkpointer = Checkpointer(store=store, keep=10)
    checkpointer.restore(state_of(0))
    state = state_of(2)
    state["o"] = Interrupts(lambda: inner.append(checkpointer.save(2, state)))
    handle = checkpointer.save(2, state)
    with pytest.raises(SaveFailed, match="step 2 was not saved: meanwhile a handler of signals saved step 2"):
        handle.wait(SECONDS)
    assert inner[0].wait(SECONDS)
    checkpointer.close()
    assert isinstance(handle.outcome, Failed)
    Catalog(store).gc(1)
    assert step_of(everstep.load(store=store).state) == 2


def test_save_in_which_a_handler_closes_says_that_it_was_not_made() -> None:
    store = MemoryStore("x")
    checkpointer = Checkpointer(store=store)
    checkpointer.restore(state_of(0))
    with pytest.raises(SettingUnusable, match="step 1 was not saved: meanwhile the Checkpointer was closed"):
        checkpointer.save(1, {**state_of(1), "o": Interrupts(checkpointer.close)})
    with pytest.raises(SettingUnusable, match="closed"):
        checkpointer.add_metrics(1, {"loss": 1.0})


@pytest.mark.long
@pytest.mark.timeout(120)
def test_signals_that_come_at_random_moments_hang_no_save() -> None:
    checkpointer, state, step, heard = Checkpointer(store=MemoryStore("x"), keep=2), state_of(0), 0, 0
    chance = random.Random(3)
    checkpointer.restore(state)

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard += 1
        checkpointer.save(step, state)
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0002, 0.003))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while heard < 500:
            step += 1
            checkpointer.save(step, state)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert checkpointer.wait(SECONDS)  # those for which there was no memory between two others are left out
    assert checkpointer.save(step + 1, state).wait(SECONDS)
    checkpointer.close()
