"""`everstep bench`: each size is run, measured and drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstep_local.bench import command
from everstep_local.bench.plot import draw
from everstep_local.bench.scaling import Measured, Scaling, rows

SCRIPT = Path(__file__).with_name("instruments_script.py")


def measured(workers: int, rate: float, communication: float | None = None) -> Measured:
    return Measured(workers, rate, 100, 100 / rate, communication, communication)


def test_strong_scaling_asks_for_more_steps_and_weak_scaling_for_as_many() -> None:
    found = [measured(4, 30.0), measured(1, 10.0), measured(2, 20.0)]
    strong = rows(found, Scaling.STRONG)
    assert [row.measured.workers for row in strong] == [1, 2, 4]
    assert [row.speedup for row in strong] == [1, 2, 3]
    assert [row.efficiency for row in strong] == [1, 1, 0.75]
    weak = rows([measured(2, 10.0), measured(4, 9.0)], Scaling.WEAK)
    assert [row.speedup for row in weak] == [1, 1.8]
    assert [row.efficiency for row in weak] == [1, 0.9]


def test_plot_has_every_size_with_its_figures_and_escapes_the_title() -> None:
    drawn = draw(rows([measured(1, 10.0), measured(2, 15.0, 0.4)], Scaling.STRONG), "<a> & b")
    words = [t for t in ElementTree.fromstring(drawn).itertext() if t.strip()]
    assert "<a> & b" in words
    assert {"1 worker", "2 workers", "1.50×", "75 %, 40 % comm.", "100 %"} <= set(words)
    assert ElementTree.fromstring(draw(rows([measured(3, 1.0)], Scaling.WEAK), "one size"))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_sizes_are_run_one_after_the_other_and_compared(tmp_path: Path) -> None:
    argv = ["bench", str(SCRIPT), "--sizes", "2,1", "--seconds", "3", "--warmup", "2", "--out", str(tmp_path / "b")]
    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", *argv, "--", str(tmp_path / "sleeper")],
        capture_output=True, text=True, timeout=380, check=False, env={**os.environ, "XDG_RUNTIME_DIR": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "b/scaling.json").read_text())["rows"]
    assert [row["workers"] for row in made] == [1, 2]
    assert all(row["steps"] > 0 and row["steps_per_second"] > 0 for row in made)
    assert made[0]["communication"] < made[1]["communication"] < 1, "a single rank talks to nobody"
    assert "EFFICIENCY" in done.stdout
    assert ElementTree.parse(tmp_path / "b/scaling.svg")


@pytest.mark.parametrize(
    ("sizes", "problem"), [("1,x", "numbers of workers are expected"), ("0,2", "each is from 1 to 64")]
)
def test_sizes_that_mean_nothing_are_refused(sizes: str, problem: str) -> None:
    done = CliRunner().invoke(command.app, [str(SCRIPT), "--sizes", sizes])
    assert isinstance(done.exception, command.EXPECTED), done.output
    assert problem in str(done.exception)
