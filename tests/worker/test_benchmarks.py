"""The benchmarks still run: nothing else would notice that a name which they use is gone.

Each script answers `--help`, which imports all of it. Those that can, run a quick cell whose figures file has the
agreed shape; of the checkpoint benchmark, which starts six worlds a cell, all acts are done in one.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if path.name != "figures.py")


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/checkpoint.py as a module; what it and its world leave in this process is undone."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("checkpoint_benchmark", BENCHMARKS / "checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def check(document: str) -> set[str]:
    """The names of the figures, if the document has the agreed shape."""
    body = json.loads(document)
    assert list(body) == ["figures"]
    figures: list[dict[str, Any]] = body["figures"]
    names = [figure["name"] for figure in figures]
    assert names == sorted(set(names)) != []
    for figure in figures:
        assert list(figure) == ["name", "value", "unit", "goal", "better", "met", "n"]
        assert isinstance(figure["value"], int | float)
        assert isinstance(figure["unit"], str)
        assert figure["better"] in ("lower", "higher")
        assert figure["n"] >= 1
        assert (figure["met"] is None) == (figure["goal"] is None)
    return set(names)


@pytest.mark.long_but("checkpoint.py")
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_that_is_asked_for_help_knows_its_imports_and_its_arguments(script: str) -> None:
    text = run(script, "--help")
    assert "--quick" in text
    assert "--json" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("reporting.py", "report_call.operator_there.p50"),
        ("rendezvous.py", "lose_one_of_3.p50"),
        ("data.py", "reshard.p95"),
        ("replacement.py", "replacement.p99"),
    ],
)
def test_quick_cell_gives_figures_of_the_agreed_shape(script: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run(script, "--quick", "--json", str(path))
    assert name in check(path.read_text())


@pytest.mark.long
def test_every_act_of_the_checkpoint_benchmark_on_files_gives_its_figures(
    checkpoint: ModuleType, tmp_path: Path
) -> None:
    with checkpoint.World(1, 2**22) as world:
        place = checkpoint.Place("disk", tmp_path)
        cell = checkpoint.Cell(place, lambda: contextlib.nullcontext(world), 1, full=True)
        figures = checkpoint.figures_of("files", checkpoint.measure(cell), s3=False)
        figures += checkpoint.training_figures("files", checkpoint.train(cell), 1)
    names = check(sys.modules["figures"].to_json(figures))
    goals = {f"{goal}.files" for goal in ("blocked", "save", "load", "memory", "training_cost", "steps_slower")}
    assert goals <= names
    assert not list(tmp_path.rglob("*.safetensors"))
