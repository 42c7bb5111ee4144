"""An attribute that a call changes which the loop's text does not show is refused, if the loop trains by it."""

from __future__ import annotations

import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_text.hidden_attributes import HiddenAttributes
from everstep.train.guards.script_text.loop_check import check_hidden


def play(folder: Path, text: str, untracked: tuple[str, ...] = ()) -> None:
    """Run it as a script, whose loop over `steps()` is checked at the end of each step."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    attributes = HiddenAttributes()

    def steps() -> Iterator[int]:
        for number in range(8):
            yield number
            frame = sys._getframe(1)
            if moved := attributes.completed(frame):
                check_hidden(frame, None, {}, lambda *names: bool({*names} & {*untracked}), moved)

    runpy.run_path(str(script), {"steps": steps}, "__main__")


LISTED = """
    class Weight:
        def __init__(self):
            self.count_here = 0
        def __call__(self):
            return 1.0 if self.count_here < 500 else 0.5
        def after(self, number):
            self.count_here += 1
    class Loss:
        def backward(self):
            pass
        def __rmul__(self, factor):
            return self
    weight = Weight()
    callbacks = [weight.after]
    for number in steps():
        (weight() * Loss()).backward()
        for callback in callbacks:
            callback(number)
"""
DERIVED = (
    LISTED.replace("1.0 if self.count_here < 500 else 0.5", "self.factor_here")
    .replace("self.count_here += 1", "self.count_here += 1; self.factor_here = 1.0 / self.count_here")
    .replace("self.count_here = 0", "self.count_here, self.factor_here = 0, 1.0")
)
GROWN = (
    LISTED.replace("self.count_here = 0", "self.seen_here = []")
    .replace("self.count_here < 500", "len(self.seen_here) < 500")
    .replace("self.count_here += 1", "self.seen_here.append(number)")
)
CACHED = """
    class Loss:
        def backward(self):
            pass
        def __rmul__(self, factor):
            return self
    made_here = {}
    for idx in steps():
        if idx not in made_here:
            made_here[idx] = 1.0 / (idx + 1)
        (made_here[idx] * Loss()).backward()
"""
FLAGGED = (
    LISTED.replace("1.0 if self.count_here < 500 else 0.5", "self.factor_here")
    .replace("self.count_here += 1", "self.count_here += 1; self.factor_here = 1.0 if self.count_here < 500 else 0.5")
    .replace("self.count_here = 0", "self.count_here, self.factor_here = 0, 1.0")
)
SWAPPED = (
    LISTED.replace("1.0 if self.count_here < 500 else 0.5", "self.count_here")
    .replace("self.count_here += 1", "before = self.last_here; self.last_here = self.count_here\n"
             "            if number >= 0: self.count_here = before + 1")
    .replace("self.count_here = 0", "self.count_here, self.last_here = 0, 0")
)  # fmt: skip
TESTED = LISTED.replace("(weight() * Loss()).backward()", "if weight.count_here > 500: Loss().backward()")
IN_FUNCTION = f"def main():{LISTED}\nmain()\n"


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (LISTED, "weight.count_here"),
        (DERIVED, "weight.factor_here"),
        (GROWN, "weight.seen_here"),
        (FLAGGED, "weight.factor_here"),
        (SWAPPED, "weight.count_here"),
        (TESTED, "weight.count_here"),
        (IN_FUNCTION, "weight.count_here"),
    ],
)
def test_attribute_that_a_callback_changes_is_refused_in_the_second_step(text: str, name: str, tmp_path: Path) -> None:
    text = textwrap.dedent(text)
    with pytest.raises(LoopError, match=rf"^{name} is changed .* by calls that the text .* the gradients") as refused:
        play(tmp_path, text)
    assert "run.track(" in str(refused.value)
    assert f"run.untracked({name!r})" in str(refused.value)
    play(tmp_path, text, untracked=(name,))


# The number of the step, set anew in each step before it is read.
ANEW = """
    class Weight:
        def __init__(self):
            self.step = 0
        def __call__(self):
            return 1.0 if self.step < 500 else 0.5
        def before(self):
            self.step = run.step
    class Bar:
        def __init__(self):
            self.step = 0
        def before(self):
            self.step += 1
    class Loss:
        def backward(self):
            pass
        def __rmul__(self, factor):
            return self
    class Run:
        @property
        def step(self):
            return taken[0]
    run, weight, taken = Run(), Weight(), [0]
    callbacks = [weight.before, Bar().before]
    for taken[0] in steps():
        for callback in callbacks:
            callback()
        (weight() * Loss()).backward()
"""
LOGGED_BESIDE = (
    LISTED.replace("self.count_here += 1", "self.count_here = number\n            self.calls_here += 1")
    .replace("self.count_here = 0", "self.count_here, self.calls_here = 0, 0")
)  # fmt: skip
OTHERWISE_LONG = """
    class Net:
        def __init__(self):
            self.losses_here = []
        def forward(self, number):
            del self.losses_here
            self.losses_here = [Loss() for _ in range(1 + number % 3)]
    class Loss:
        def backward(self):
            pass
        def __add__(self, other):
            return self
        __radd__ = __add__
    net = Net()
    layers = [net.forward]
    for number in steps():
        for layer in layers:
            layer(number)
        sum(net.losses_here).backward()
"""


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "text",
    [
        ANEW,
        LOGGED_BESIDE,
        OTHERWISE_LONG,
        LISTED.replace("(weight() * Loss())", "print(weight()); Loss()"),
        LISTED.replace("self.count_here < 500", "True"),
        CACHED,
        LISTED.replace("self.count_here += 1", "pass"),
        DERIVED.replace("self.count_here += 1; self.factor_here = 1.0 / self.count_here", "self.factor_here = number"),
    ],
    ids=[
        "set anew from the run's step",
        "set anew beside a count for the log",
        "a list that each step makes anew",
        "only printed",
        "not read",
        "a cache",
        "not changed",
        "set anew from the number of the step",
    ],
)
def test_what_does_not_go_from_step_to_step_into_the_training_is_let_through(text: str, tmp_path: Path) -> None:
    play(tmp_path, text)


@pytest.mark.turns(3)
def test_attribute_that_the_loop_sets_before_it_reads_it_is_let_through(tmp_path: Path) -> None:
    play(tmp_path, LISTED.replace("(weight()", "weight.count_here = number\n        (weight()"))


def test_own_comparison_of_an_object_is_not_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table's or an array's gives no truth value."""
    own = "def __eq__(self, other):\n            raise ValueError('compared')\n        def after"
    with pytest.raises(LoopError, match="count_here"):
        play(tmp_path, LISTED.replace("def after", own))
    assert not caplog.records


OF_A_CLASS = """
    class Skip(Exception):
        count_here = 0
        def __init__(self):
            super().__init__()
            {init}
        @classmethod
        def after(cls):
            {method}
    class Loss:
        def backward(self):
            pass
        def __rmul__(self, factor):
            return self
    for number in steps():
        ({reads} * Loss()).backward()
        try:
            {raises}
        except Skip:
            pass
"""
READS = "(1.0 if Skip.count_here < 500 else 0.5)"


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "change",
    [
        {"init": "Skip.count_here += 1", "method": "pass", "raises": "raise Skip"},
        {"init": "type(self).count_here += 1", "method": "pass", "raises": "raise Skip"},
        {"init": "pass", "method": "cls.count_here += 1", "raises": "Skip.after()"},
    ],
    ids=["in __init__", "of its type", "in a classmethod"],
)
def test_count_that_an_exceptions_class_keeps_is_refused_by_its_name(tmp_path: Path, change: dict[str, str]) -> None:
    with pytest.raises(LoopError, match=r"Skip\.count_here is changed from step to step, by calls"):
        play(tmp_path, OF_A_CLASS.format(reads=READS, **change))
    play(tmp_path, OF_A_CLASS.format(reads=READS, **change), untracked=("Skip.count_here",))


@pytest.mark.turns(3)
def test_count_of_a_class_that_the_loop_does_not_train_by_passes(tmp_path: Path) -> None:
    play(tmp_path, OF_A_CLASS.format(reads="1.0", init="Skip.count_here += 1", method="pass", raises="raise Skip"))
