"""The adapters in the real loops: a run that was stopped, killed and resumed ends with the undisturbed run's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.adapters.adapter_run import Ended, launch, run
from support.adapters.adapter_script import commits

pytestmark = pytest.mark.timeout(900)  # four runs, and the import of a framework

STEPS = 30  # 40 samples, 4 a step, 3 epochs
EVERY = 5  # steps from commit to commit


def disturbed(framework: str, ranks: int, folder: Path, *arguments: object) -> Ended:
    """SIGTERM in step 7, to the last rank alone; SIGKILL to all after the next commit, in the middle of a step; then to
    the end. With one rank that commit is step 10, the end of the first epoch."""
    common = ("--url", folder, *arguments)
    # Steps that take long: ranks of short ones agree only every so many steps.
    stopped = run(framework, ranks, *common, "--term-at", 7, "--rank-told", max(0, ranks - 1), "--pause", 0.3)
    assert stopped.codes == [86] * max(1, ranks), stopped.output[-4000:]
    assert "its state is committed" in stopped.output, stopped.output[-4000:]
    at = commits(folder)[-1]
    assert 8 <= at <= (20 if ranks else 8), "the step at hand, or the one by which all ranks had heard of it"

    newest = at - at % EVERY + EVERY
    killed = run(framework, ranks, *common, "--kill-at", newest + 3, "--kill-after", newest)
    assert -9 in killed.codes, killed.output[-4000:]
    assert 0 not in killed.codes, killed.output[-4000:]
    assert killed.began == at
    assert commits(folder)[-1] == newest, killed.output[-4000:]

    resumed = run(framework, ranks, *common)
    assert resumed.well, resumed.output[-4000:]
    assert resumed.began == newest
    return resumed


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "ranks", "kind", "workers"),
    [
        ("huggingface", 0, "", 1),
        ("huggingface", 2, "", 0),
        ("accelerate", 0, "", 1),
        ("accelerate", 2, "", 0),
        ("accelerate", 2, "elastic", 0),
        ("lightning", 0, "", 1),
        ("lightning", 2, "elastic", 0),
    ],
)
def test_run_stopped_killed_and_resumed_ends_with_the_same_bits(
    framework: str, ranks: int, kind: str, workers: int, tmp_path: Path
) -> None:
    batch = 4 if kind == "elastic" or not ranks else 4 // ranks
    arguments = ("--batch", batch, "--kind", kind, "--workers", workers)
    begin = launch if ranks else run
    undisturbed = begin(framework, ranks, "--url", tmp_path / "a", *arguments)
    assert undisturbed.well, undisturbed.output[-4000:]
    resumed = disturbed(framework, ranks, tmp_path / "b", *arguments)
    assert undisturbed.done[0] == STEPS
    assert resumed.done == undisturbed.done


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "kind"),
    [("huggingface", ""), ("accelerate", ""), ("lightning", "elastic")],
)
def test_resized_run_with_the_same_global_batch_takes_each_sample_once_an_epoch(
    framework: str, kind: str, tmp_path: Path
) -> None:
    url, seen = tmp_path / "commits", tmp_path / "seen"
    seen.mkdir()
    arguments = ("--url", url, "--kind", kind, "--seen", seen)
    assert run(framework, 0, *arguments, "--batch", 4, "--term-at", 7).codes == [86]
    grown = launch(framework, 2, *arguments, "--batch", 4 if kind == "elastic" else 2)
    assert grown.well, grown.output[-4000:]
    assert grown.began == 8
    records = [json.loads(line) for path in seen.iterdir() for line in path.read_text().splitlines()]
    for epoch in range(3):
        of_epoch = [r["samples"] for r in records if epoch * 10 <= r["step"] < epoch * 10 + 10]
        assert sorted(sample for samples in of_epoch for sample in samples) == list(range(40))


def test_importing_the_adapters_imports_no_framework() -> None:
    code = "import sys, everstep.train.adapters; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "lightning", "accelerate"} & set(loaded)


def test_adapter_without_its_package_names_what_to_install() -> None:
    code = """
import importlib, sys
for package in ("transformers", "lightning", "accelerate"):  # all before the first import: one adapter uses two
    sys.modules[package] = None
for adapter in ("huggingface", "lightning", "accelerate"):
    try:
        importlib.import_module("everstep.train.adapters." + adapter)
    except ImportError as e:
        print(e)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'transformers[torch]'" in said
    assert "pip install lightning" in said
    assert "pip install accelerate" in said
