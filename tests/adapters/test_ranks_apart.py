"""Ranks of a framework's job that train apart from each other are refused by name, and are started once.

Under `torchrun` the adapters compared nothing: such a run ended with exit code 0, and its commits held rank 0's part.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import TESTS
from support.adapters.adapter_run import HERE, MODULES, SECONDS, environment
from support.adapters.unbroken_run import SIZE, play
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(600)

FRAMEWORKS = ("huggingface", "lightning", "accelerate")


def ranks(folder: Path, framework: str, way: str, kind: str = "") -> tuple[list[int], str]:
    """Two ranks; their exit codes, and what they said."""
    output = folder / "output"
    argv = [HERE / "run_apart.py", framework, way, folder, kind]
    started = Ranks(warm(*MODULES[framework]), 2, argv, output, environment())
    try:
        codes = started.wait(SECONDS)
    finally:
        started.kill()
    return codes, output.read_text()


SAMPLES = "[the same data]"
REPLICAS = "all ranks hold the same parameters"
STREAM = "an `IterableDataset`"
SHARDED = "parameters that FSDP2 has sharded"
# What is wrong, the row of the page that promises something of it, and what is said where it is refused.
WAYS = [
    ("split", SAMPLES, "rank 1 reads another sample than rank 0 under index"),
    ("drift", REPLICAS, r"ranks hold different parameters, model\.\S*head.weight among them"),
    ("thaw", "an optimizer moves no parameter", r"body.weight: requires_grad was switched on after DistributedDataPar"),
    ("buffers", REPLICAS, r"the ranks have different values of model\.\S*mean"),
    ("norms", REPLICAS, r"different values of model\.\S*norm.running_mean.*Leave broadcast_buffers=False out"),
    ("shards", "samples of shards", ""),
    ("stream", STREAM, "IterableDataset"),
]
OF_ACCELERATE = [("fsdp", SHARDED, ""), ("local", REPLICAS, "LocalSGD")]
PROBES = [(framework, *way) for framework in FRAMEWORKS for way in WAYS] + [("accelerate", *w) for w in OF_ACCELERATE]
NAMES = {"huggingface": "Trainer", "lightning": "Lightning", "accelerate": "Accelerate"}


def is_refused(row: str, framework: str, column: int) -> bool:
    """Whether the page says so: a cell is `yes`, `no` or `refused`, or says it by name, `Trainer: refused; …`."""
    page = (TESTS.parent / "docs/reference/adapters.md").read_text().partition("## What is checked")[2]
    rows = [line.strip("| ").split(" | ") for line in page.partition("\n\nRanks that differ")[0].splitlines()]
    (cells,) = (cells for cells in rows if cells[0].startswith(row))
    parts = [part.rpartition(": ") for part in cells[column].split("; ")]
    (said,) = (said for names, _, said in parts if not names or NAMES[framework] in names)
    word = said.strip("*").partition(",")[0]
    assert word in ("yes", "no", "refused"), f"{row}: {word}"
    return word != "no"


@pytest.mark.turns(3)
@pytest.mark.parametrize(("framework", "way", "row", "said"), PROBES)
def test_ranks_that_train_apart_are_refused_where_the_page_says_so(
    framework: str, way: str, row: str, said: str, tmp_path: Path
) -> None:
    codes, output = ranks(tmp_path, framework, way)
    if not is_refused(row, framework, 3):
        assert (codes, output.count("trained to the end")) == ([0, 0], 2), output[-4000:]
        return
    assert codes == [1, 1], output[-4000:]
    assert re.search(said, output), output[-4000:]
    assert "trained to the end" not in output
    assert "run.untracked" not in output, "a method that these scripts do not have"


@pytest.mark.parametrize("way", ["", "sent"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ranks_that_train_together_are_let_through(framework: str, way: str, tmp_path: Path) -> None:
    codes, output = ranks(tmp_path, framework, way)
    assert codes == [0, 0], output[-4000:]
    assert output.count("trained to the end") == 2


@pytest.mark.turns(3)
@pytest.mark.parametrize(("framework", "way", "row", "said"), PROBES)
def test_ranks_under_everstep_run_that_train_apart_are_refused_once_where_the_page_says_so(
    framework: str, way: str, row: str, said: str, tmp_path: Path
) -> None:
    kind = "loop" if framework == "accelerate" else ""
    preload = MODULES[framework][-1]
    folder = tmp_path / "run"
    played = play(folder, HERE / "run_apart.py", framework, way, folder, kind, preload=preload, restarts=2)
    if not is_refused(row, framework, 1 if framework == "accelerate" else 2):
        assert (played.code, played.output.count("trained to the end")) == (0, SIZE), played.output[-4000:]
        return
    assert played.code == 1, played.output[-4000:]
    assert re.search(said, played.output), played.output[-4000:]
    assert "trained to the end" not in played.output
    assert len(list(folder.glob("began-*"))) == SIZE, "each was started once"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_script_that_catches_the_refusal_fails_with_its_sentence(framework: str, tmp_path: Path) -> None:
    """Its exit code was 0 before, as if its run were complete."""
    codes, output = ranks(tmp_path, framework, "split", "caught")
    assert codes == [1, 1], output[-4000:]
    assert output.count("the script has caught LoopError") == 2, output[-8000:]
    refused = [line for line in output.splitlines() if "everstep: refused: " in line]
    assert len(refused) == 2, "each rank is a launch of its own"
    assert all("reads another sample than rank 0" in line for line in refused)
