"""A global variable that changes by no line of the script is refused while every process still has it."""

from __future__ import annotations

import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_text.hidden_changes import HiddenChanges


def play(folder: Path, text: str, untracked: tuple[str, ...] = ()) -> None:
    """Run it as a script; it calls `completed()` at the end of each step."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    hidden = HiddenChanges(lambda *names: bool({*names} & {*untracked}))
    runpy.run_path(str(script), {"completed": lambda: hidden.completed(sys._getframe(1))}, "__main__")


# Names with an ending of their own: an attribute of that name, assigned in any other test that was imported, would
# explain the change.
COUNTED = """
    count_here = 0
    for step in range(2):
        exec("count_here = count_here + 1")
        completed()
"""
THRESHOLD = """
    factor_here = 1.0
    for step in range(8):
        if step == 5:
            globals()["factor_here"] = 0.5
        completed()
"""
IN_FUNCTION = """
    rate_here = 1.0
    def main():
        for step in range(2):
            exec("rate_here = rate_here / 2", globals())
            completed()
    main()
"""
OF_LIST = """
    seen_here = [0]
    for step in range(2):
        exec("seen_here[0] += 1")
        completed()
"""


BESIDE_A_CLASS = """
    class Meter:
        def __init__(self):
            self.counted = 0
        def add(self):
            self.counted += 1
    meter, counted = Meter(), 0
    for step in range(2):
        meter.add()
        exec("counted = counted + 1")
        completed()
"""


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (COUNTED, "count_here"),
        (THRESHOLD, "factor_here"),
        (IN_FUNCTION, "rate_here"),
        (OF_LIST, "seen_here"),
        (BESIDE_A_CLASS, "counted"),
    ],
)
def test_variable_that_changes_by_no_line_is_refused_with_the_line_to_write(
    text: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(LoopError, match=rf"^{name} changes from step to step, and no line of train\.py") as refused:
        play(tmp_path, text)
    assert f"Write carried = {{'{name}': {name}}} and run.track(carried=carried)" in str(refused.value)
    assert f"carried['{name}'] in place of {name}; or" in str(refused.value)
    play(tmp_path, text, untracked=(name,))


def test_all_such_variables_are_told_at_once(tmp_path: Path) -> None:
    text = """
        a_here = b_here = 0
        for _ in range(2):
            exec("a_here, b_here = a_here + 1, b_here - 1")
            completed()
    """
    with pytest.raises(LoopError, match=r"^a_here, b_here change from .*starts without them.*'a_here', 'b_here'\)"):
        play(tmp_path, text)


EXPLAINED = {
    "in the loop": """
        n, first = 0, None
        for step in range(4):
            n += 1
            with open(__file__) as f:
                first = f
            completed()
    """,
    "by a function": """
        n = 0
        def count():
            global n
            n += 1
        for step in range(4):
            count()
            completed()
    """,
    "through its module": """
        import sys
        n, me = 0, sys.modules[__name__]
        for step in range(4):
            me.n = step
            completed()
    """,
    "behind the loop over the first steps": """
        n = 0
        completed()
        n = 1
        completed()
    """,
    "in the loop around the function that has the loop": """
        def epoch(number):
            total = number
            for step in range(2):
                total += step
                completed()
        for number in range(2):
            epoch(number)
    """,
    "in a list that another object has too": """
        class Recorder:
            def __init__(self, values):
                self.values = values
        values = []
        recorder = Recorder(values)
        for step in range(4):
            recorder.values.append(step)
            completed()
    """,
    "in a list that the loop names": """
        losses = []
        for step in range(4):
            losses.append(float("nan"))
            completed()
    """,
    "never": """
        a, b, c = float("nan"), [1, 2], "text"
        for step in range(4):
            completed()
    """,
}


@pytest.mark.parametrize("how", EXPLAINED)
def test_variable_that_a_line_may_change_is_left_to_the_reader_of_the_text(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play(tmp_path, EXPLAINED[how])
    assert not caplog.records
