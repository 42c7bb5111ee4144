"""The figures file: its shape, what it refuses, and when it fails a run."""

import importlib.util
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st


def _load() -> ModuleType:
    # benchmarks/ is a folder of scripts, not a package: it is loaded as its scripts load it.
    path = Path(__file__).parents[2] / "benchmarks" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


figures = _load()
Figure, Better = figures.Figure, figures.Better


def test_document_has_the_agreed_fields_sorted_by_name() -> None:
    given_figures = [
        Figure("b.p95", 4.5, "s", Better.LOWER, n=10, goal=6),
        Figure("a.rate", 10, "1/s", Better.HIGHER, n=3),
    ]
    assert json.loads(figures.to_json(given_figures)) == {
        "figures": [
            {"name": "a.rate", "value": 10, "unit": "1/s", "goal": None, "better": "higher", "met": None, "n": 3},
            {"name": "b.p95", "value": 4.5, "unit": "s", "goal": 6, "better": "lower", "met": True, "n": 10},
        ]
    }


@pytest.mark.parametrize(
    ("better", "value", "met"), [("lower", 6, True), ("lower", 6.1, False), ("higher", 6, True), ("higher", 5.9, False)]
)
def test_goal_is_met_in_the_right_direction(better: str, value: float, met: bool) -> None:
    assert Figure("x", value, "s", Better(better), n=1, goal=6).met is met


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "two words"},
        {"value": float("nan")},
        {"value": float("inf")},
        {"goal": float("nan")},
        {"n": 0},
    ],
)
def test_misleading_figure_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(figures.FigureError):
        Figure(**({"name": "x", "value": 1.0, "unit": "s", "better": Better.LOWER, "n": 1} | wrong))


def test_name_given_twice_is_refused() -> None:
    with pytest.raises(figures.FigureError, match="x was given twice"):
        figures.to_json([Figure("x", 1, "s", Better.LOWER, n=1)] * 2)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantile_is_a_measured_value_that_enough_samples_do_not_pass(samples: list[float], q: float) -> None:
    value = figures.quantile(samples, q)
    assert value in samples
    assert sum(s <= value for s in samples) >= q * len(samples)


def test_spread_of_ten_samples_judges_the_worst_as_p95() -> None:
    by_name = {f.name: f for f in figures.spread("recovery", [float(i) for i in range(1, 11)], "s", goal_p95=9)}
    assert {name: f.value for name, f in by_name.items()} == {
        "recovery.p50": 5,
        "recovery.p95": 10,
        "recovery.min": 1,
        "recovery.max": 10,
    }
    assert [name for name, f in by_name.items() if f.met is False] == ["recovery.p95"]


def test_missed_goal_fails_a_full_run_and_not_a_quick_one(tmp_path: Path) -> None:
    missed = [Figure("x", 2, "s", Better.LOWER, n=1, goal=1)]
    path = tmp_path / "deep" / "figures.json"
    parse = figures.parser("a benchmark").parse_args
    out = io.StringIO()
    assert figures.finish(missed, parse(["--json", str(path)]), out) == 1
    assert figures.finish(missed, parse(["--quick"]), out) == 0
    assert json.loads(path.read_text())["figures"][0]["met"] is False
    assert "| x      | 2 s   | ≤ 1 s | NO  | 1 |" in out.getvalue()


def test_json_to_standard_output_is_only_json() -> None:
    out = io.StringIO()
    assert (
        figures.finish([Figure("x", 1, "s", Better.LOWER, n=1)], figures.parser("").parse_args(["--json", "-"]), out)
        == 0
    )
    assert json.loads(out.getvalue())["figures"][0]["name"] == "x"


def test_benchmark_that_is_ended_ends_what_it_has_started() -> None:
    script = (
        "import subprocess, sys\n"
        "from figures import parser\n"
        "parser(None).parse_args()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=subprocess.DEVNULL)\n"
        "try:\n"
        "    print(child.pid, flush=True)\n"
        "    child.wait()\n"
        "finally:\n"
        "    child.kill()\n"
        "    child.wait()\n"
        "    print('cleaned up', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2] / "benchmarks",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    process.terminate()
    printed, errors = process.communicate(timeout=30)
    assert (process.returncode, printed, errors) == (128 + signal.SIGTERM, "cleaned up\n", "")
