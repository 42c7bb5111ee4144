"""Which numbers of `enumerate` a rehearsal leaves out, because nothing but their loop has them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = """
import sys

from everstep.rehearse.idle_indices import idle_indices


def body():
    return idle_indices(sys._getframe())


def main():
    for step, (x, y) in enumerate([(1, 2), (3, 4)]):
        found = body()
        {work}
    return found


found = main()
"""


@pytest.mark.parametrize(
    ("work", "names"),
    [
        ("pass", {"step", "main.step"}),
        ("for step, row in enumerate([5]): print(x + row)", {"step", "main.step"}),
        ("print(step=0) if not x else None", {"step", "main.step"}),
        ("print(step)", set()),
        ("f'{step}'", set()),
        ("step += 1", set()),
        ("(lambda: step)()", set()),
        ("sorted(locals())", set()),
        ("eval('step')", set()),
    ],
)
def test_number_of_enumerate_is_left_out_where_nothing_reads_it(tmp_path: Path, work: str, names: set[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(work=work))
    assert runpy.run_path(str(tmp_path / "train.py"))["found"] == names
