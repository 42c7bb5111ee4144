"""State to which no variable of a script's loop leads is read all the same, from the whole heap."""

from __future__ import annotations

import array
import asyncio
import contextvars
import functools
import gc
import itertools
import logging
import queue
import re
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.rehearse.begun_anew import Heap, begun_anew

pytestmark = pytest.mark.timeout(240)

Step = Callable[[], Any]


def property_of_a_closure() -> Step:
    n = 0

    class Meter:
        @property
        def read(self) -> int:
            nonlocal n
            n += 1
            return n

    meter = Meter()
    return lambda: meter.read


def result_in_a_cache() -> Step:
    @functools.cache
    def box() -> dict[str, int]:
        return {"boxed": 0}

    return lambda: box().update(boxed=box()["boxed"] + 1)


def variable_of_another_context() -> Step:
    gain, context = contextvars.ContextVar("gained", default=0), contextvars.copy_context()
    return lambda: context.run(lambda: gain.set(gain.get() + 1))


def iterator_in_c() -> Step:
    count = itertools.count()
    return lambda: next(count)


def variable_of_a_task() -> Step:
    async def work() -> None:
        ticks = 0
        while True:
            ticks += 1
            await asyncio.sleep(0)

    task = work()
    return lambda: task.send(None)


def variable_of_a_thread() -> Step:
    asked, answered = queue.Queue[int](), queue.Queue[int]()

    def serve() -> None:
        served = 0
        while True:
            served += asked.get()
            answered.put(served)

    threading.Thread(target=serve, daemon=True).start()

    def step() -> None:
        asked.put(1)
        answered.get()

    return step


def finalizer() -> Step:
    died = 0

    def gone() -> None:
        nonlocal died
        died += 1

    class Sample:
        pass

    return lambda: weakref.finalize(Sample(), gone) and None


class Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.emitted = 0

    def emit(self, _: logging.LogRecord) -> None:
        self.emitted += 1


def handler_of_the_root_logger() -> Step:
    logging.root.addHandler(Counting())
    return lambda: logging.getLogger("some.logger").error("a record")


def object_of_a_library() -> Step:
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - few tests need it

    with open("/dev/null", "w") as nowhere:
        bar = tqdm(total=9, file=nowhere)

    def step() -> None:
        bar.n += 1

    return step


def module_that_nothing_imports() -> Step:
    phase: Any = types.ModuleType("a_phase_of_the_script")
    phase.done = 0
    sys.modules["a_phase_of_the_script"] = phase
    del phase

    def step() -> None:
        sys.modules["a_phase_of_the_script"].done += 1  # type: ignore[attr-defined]

    return step


def array_of_numbers() -> Step:
    numbers = array.array("l", [0] * 300)
    return lambda: numbers.__setitem__(77, numbers[77] + 1)


def array_of_objects() -> Step:
    import numpy as np  # noqa: PLC0415

    objects = np.empty(1, dtype=object)
    objects[0] = {"n": 0}
    return lambda: objects[0].update(n=objects[0]["n"] + 1)


def tensor() -> Step:
    import torch  # noqa: PLC0415

    weights = torch.zeros(50, 50)
    return lambda: weights[3, 3].add_(1)


def partial() -> Step:
    def take(state: dict[str, int]) -> None:
        state["taken"] += 1

    return functools.partial(take, {"taken": 0})


def default_of_a_lambda() -> Step:
    mapped = map(lambda _, seen=[0]: seen.__setitem__(0, seen[0] + 1), itertools.repeat(1))  # type: ignore[misc]
    return lambda: next(mapped)


def hook_of_a_node() -> Step:
    import torch  # noqa: PLC0415

    seen = []

    def step() -> None:
        loss = torch.ones(1, requires_grad=True).sum()
        loss.grad_fn.register_hook(lambda *_: seen.append(None))  # type: ignore[union-attr]
        loss.backward()  # type: ignore[no-untyped-call]

    return step


ROWS: dict[str, tuple[Callable[[], Step], str]] = {
    "property of a closure": (property_of_a_closure, "property_of_a_closure.<locals>.Meter.read:n"),
    "result in a cache": (result_in_a_cache, "_lru_cache_wrapper[…]['boxed']"),
    "another context": (variable_of_another_context, ":context['gained']"),
    "iterator in C": (iterator_in_c, ":count"),
    "task": (variable_of_a_task, ".work:ticks"),
    "thread": (variable_of_a_thread, ".serve:served"),
    "finalizer": (finalizer, ".gone:died"),
    "handler of the root logger": (handler_of_the_root_logger, "Counting.emitted"),
    "object of a library": (object_of_a_library, "tqdm.n"),
    "module that nothing imports": (module_that_nothing_imports, "a_phase_of_the_script.done"),
    "array of numbers": (array_of_numbers, ":numbers"),
    "array of objects": (array_of_objects, ":objects"),
    "tensor": (tensor, "tensor.<locals>.<lambda>:weights"),
    "partial": (partial, "partial of partial.<locals>.take.args[0]['taken']"),
    "default of a lambda": (default_of_a_lambda, ".__defaults__[0][0]"),
    "hook of a node": (hook_of_a_node, "hook_of_a_node.<locals>.step:seen"),
}


Read = tuple[Heap, Heap, list[str], list[str]]


def read(beyond: list[str], unread: list[str]) -> Heap:
    """As at the end of a loop whose variables do not lead to the steps."""
    from everstep.rehearse import heap  # noqa: PLC0415 - torch
    from everstep.train.guards.plain_values import Roots  # noqa: PLC0415

    named = "boxed", "n"  # a key and an attribute of a library count where the script's text has them
    assert named
    outermost = frame = sys._getframe()
    while outermost.f_back is not None:  # variables of the tests would lead there
        outermost = outermost.f_back
    return heap.read(Roots(outermost), frame, beyond, unread)


@pytest.fixture(scope="module")
def heaps() -> Iterator[Read]:
    """Before a step of each row and behind it; what is too much; and what cannot be read."""
    from torch.utils.data import BatchSampler  # noqa: PLC0415

    handlers = list(logging.root.handlers)
    gc.collect()
    gc.freeze()  # as what a fork server imports is
    try:
        steps = {name: make() for name, (make, _) in ROWS.items()}
        base = sqlite3.connect(":memory:"), re.finditer("a", "aa"), BatchSampler(range(4), 2, drop_last=True).__iter__()
        steps["unread"] = lambda: base
        for step in steps.values():
            step()
        beyond, unread = list[str](), list[str]()
        before, again = read(beyond, unread), read(beyond, unread)
        assert {name for name in before if before[name] != again[name]} == set(), "to read changes nothing"
        for step in steps.values():
            step()
        yield before, read(beyond, unread), beyond, unread
    finally:
        gc.unfreeze()
        logging.root.handlers[:] = handlers
        sys.modules.pop("a_phase_of_the_script", None)


@pytest.mark.parametrize("kind", ROWS)
def test_state_to_which_no_variable_leads_has_a_name(kind: str, heaps: Read) -> None:
    before, behind, *_ = heaps
    changed = {name for name in before.keys() & behind.keys() if before[name] != behind[name]}
    assert [name for name in changed if name.endswith(ROWS[kind][1])], sorted(changed)


def test_what_cannot_be_read_is_named_and_nothing_is_too_much(heaps: Read) -> None:
    *_, beyond, unread = heaps
    kinds = {name.partition(" (")[2].rstrip(")") for name in unread}
    assert kinds >= {"sqlite3.Connection", "re.finditer", "torch.utils.data.sampler.BatchSampler.__iter__"}
    assert beyond == []


def test_names_of_pythons_own_are_no_state_of_a_library(tmp_path: Path) -> None:
    """A script with a docstring names `__doc__`, which each class of a library has that is imported late."""
    from everstep.rehearse.elsewhere import named_by_script  # noqa: PLC0415 - torch

    script = tmp_path / "documented.py"
    script.write_text('''"""A script."""\nimport sys\nclock = 1\nprint(__doc__)\nframe = sys._getframe()\n''')
    made = types.ModuleType("documented")
    made.__file__ = str(script)
    sys.modules["documented"] = made
    try:
        exec(compile(script.read_text(), str(script), "exec"), vars(made))
        named = named_by_script(made.frame)
    finally:
        del sys.modules["documented"]
    assert "clock" in named
    assert not [name for name in named if name.startswith("__")]


def test_reading_keeps_none_of_the_frames_that_it_reads() -> None:
    """The generator of the script's loop ends with the loop, and not when the collector runs."""
    from everstep.rehearse import heap  # noqa: PLC0415 - torch
    from everstep.train.guards.plain_values import Roots  # noqa: PLC0415

    class Loop:
        pass

    def reads() -> weakref.ref[Loop]:
        loop = Loop()
        heap.read(Roots(None), None, [], [])
        return weakref.ref(loop)

    gc.disable()
    try:
        assert reads()() is None
    finally:
        gc.enable()


def test_value_counts_that_changes_with_the_steps_alike_in_calm_runs_and_begins_anew() -> None:
    def run(first: int, second: int, **other: tuple[list[str], list[str]]) -> dict[int, Heap]:
        both = {"Meter.n": ([str(first)], [str(second)]), "Meter.same": (["1"], ["1"]), **other}
        return {at + 11: {name: texts[at] for name, texts in both.items()} for at in (0, 1)}

    calm = run(10, 11, clock=(["1.5"], ["2.5"]), several=(["1", "8"], ["1", "9"]), once=(["1"], ["2"]))
    again = run(10, 11, clock=(["1.6"], ["2.7"]), several=(["1", "8"], ["1", "9"]), once=(["1"], ["2"]))
    anew = run(4, 5, clock=(["0.5"], ["0.6"]), several=(["1", "3"], ["1", "4"]), once=(["1"], ["1"]))
    assert begun_anew(calm, again, anew, 0) == {
        "Meter.n": (12, "5 on rank 0, 11 in the calm run"), "several": (12, "4 on rank 0, 9 in the calm run"),
    }  # fmt: skip
    assert begun_anew(calm, again, again, 0) == {}
    assert begun_anew(calm, {}, anew, 0) == {}, "without a second calm run nothing is known of chance"


def test_value_counts_that_changes_once_an_epoch() -> None:
    calm = {
        11: {"Meter.epochs": ["1"]},
        12: {"Meter.epochs": ["1"]},
        19: {"Meter.epochs": ["2"]},
        20: {"Meter.epochs": ["2"]},
    }
    again, anew = ({step: {"Meter.epochs": [text]} for step in (19, 20)} for text in "21")
    assert begun_anew(calm, again, anew, 0) == {"Meter.epochs": (20, "1 on rank 0, 2 in the calm run")}
    assert begun_anew({step: calm[step] for step in (19, 20)}, again, anew, 0) == {}, "what never changes is a constant"


def test_digests_are_not_shown() -> None:
    calm, anew = ({i: {"a": [f"deque with digest {name}{i}"]} for i in (1, 2)} for name in "xy")
    assert begun_anew(calm, calm, anew, 1) == {"a": (2, "not the same deque on rank 1 as in the calm run")}
