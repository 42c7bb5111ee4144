"""Ranks of a framework's job that train apart from each other are refused by name, and are started once.

Under `torchrun` the adapters compared nothing: such a run ended with exit code 0, and its commits held rank 0's part.
What all ranks change alike is here too, where the page has a row of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import everstep
from support import TESTS
from support.adapters.adapter_run import HERE, MODULES, SECONDS, environment
from support.adapters.unbroken_run import SIZE, Played, play
from support.processes.commits import commits
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


def under_everstep_run(framework: str, way: str, folder: Path) -> Played:
    kind, preload = "loop" if framework == "accelerate" else "", MODULES[framework][-1]
    return play(folder, HERE / "run_apart.py", framework, way, folder, kind, preload=preload, restarts=2)


SAMPLES = "[the same data]"
REPLICAS = "all ranks hold the same parameters"
STREAM = "an `IterableDataset`"
STRUCTURE = "[structure]"
SWITCHED = "switches that steps change"
NEW = "a new process is"
ATTRIBUTES = "[attributes](#plain-attributes) and [weights of callbacks](#weights-of-callbacks) are kept or refused"
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
    (
        "average",
        "state that nothing tracks",
        r"average (holds weights that each step changes|is an average of weights)",
    ),
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
    if said == "as on the left":
        return is_refused(row, framework, column - 1)
    word = said.strip("*").partition(",")[0]
    assert word in ("yes", "no", "refused", "saved", ATTRIBUTES), f"{row}: {word}"
    return word != "no"


@pytest.mark.long_but("huggingface-stream-an `IterableDataset`-IterableDataset")
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


@pytest.mark.long_but("lightning-")
@pytest.mark.parametrize("way", ["", "sent"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ranks_that_train_together_are_let_through(framework: str, way: str, tmp_path: Path) -> None:
    codes, output = ranks(tmp_path, framework, way)
    assert codes == [0, 0], output[-4000:]
    assert output.count("trained to the end") == 2


@pytest.mark.long_but("accelerate-stream-an `IterableDataset`-IterableDataset")
@pytest.mark.parametrize(("framework", "way", "row", "said"), PROBES)
def test_ranks_under_everstep_run_that_train_apart_are_refused_once_where_the_page_says_so(
    framework: str, way: str, row: str, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    played = under_everstep_run(framework, way, folder)
    if not is_refused(row, framework, 1 if framework == "accelerate" else 2):
        assert (played.code, played.output.count("trained to the end")) == (0, SIZE), played.output[-4000:]
        return
    assert played.code == 1, played.output[-4000:]
    assert re.search(said, played.output), played.output[-4000:]
    assert "trained to the end" not in played.output
    assert len(list(folder.glob("began-*"))) == SIZE, "each was started once"


@pytest.mark.long_but("huggingface")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_script_that_catches_the_refusal_fails_with_its_sentence(framework: str, tmp_path: Path) -> None:
    """Its exit code was 0 before, as if its run were complete."""
    codes, output = ranks(tmp_path, framework, "split", "caught")
    assert codes == [1, 1], output[-4000:]
    assert output.count("the script has caught LoopError") == 2, output[-8000:]
    refused = [line for line in output.splitlines() if "everstep: refused: " in line]
    assert len(refused) == 2, "each rank is a launch of its own"
    assert all("reads another sample than rank 0" in line for line in refused)


def held(folder: Path, output: str) -> None:
    """What was switched before step 1 is in the commit of step 2, and the layer that was pruned behind it in none."""
    assert "has another structure than when the loop began" in output, output[-4000:]
    assert commits(folder) == [2]
    saved = json.loads(everstep.load(str(folder / "commits")).state["switches"]["switched"])
    kinds = {"grown": ["float32", 2], "body.weight": False, "body.bias": False, "norm": False}
    assert {
        name.rpartition("model.")[2].removeprefix("net."): saved[name] for name in saved if name != "gradients"
    } == kinds


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_switches_are_saved_and_another_structure_is_not(framework: str, tmp_path: Path) -> None:
    assert is_refused(STRUCTURE, framework, 3)
    assert is_refused(SWITCHED, framework, 3)
    codes, output = ranks(tmp_path, framework, "held")
    assert codes == [1, 1], output[-4000:]
    held(tmp_path, output)


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_under_everstep_run_switches_are_saved_and_another_structure_is_not(framework: str, tmp_path: Path) -> None:
    column = 1 if framework == "accelerate" else 2
    assert is_refused(STRUCTURE, framework, column)
    assert is_refused(SWITCHED, framework, column)
    played = under_everstep_run(framework, "held", tmp_path / "run")
    assert played.code == 1, played.output[-4000:]
    held(tmp_path / "run", played.output)


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_step_of_a_new_process_is_compared_where_the_page_says_so(framework: str, tmp_path: Path) -> None:
    """It computes another loss than the others do. The session refuses such a step."""
    played = under_everstep_run(framework, "replaced", tmp_path / "run")
    assert (tmp_path / "run" / "killed").exists(), played.output[-4000:]
    refused = is_refused(NEW, framework, 1 if framework == "accelerate" else 2)
    assert (played.code, played.output.count("trained to the end")) == ((1, 0) if refused else (0, SIZE)), played.output
