"""Ranks of a framework's job that train apart from each other are refused by name, and are started once.

Under `torchrun` the adapters compared nothing: such a run ended with exit code 0, and its commits held rank 0's part.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


WAYS = [
    ("split", "rank 1 reads another sample than rank 0 under index"),
    ("drift", r"ranks hold different parameters, model\.\S*head.weight among them"),
    ("thaw", r"body.weight: requires_grad was switched on after DistributedDataParallel was made"),
    ("buffers", r"the ranks have different values of model\.\S*mean"),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("way", "said"), WAYS)
def test_ranks_that_train_apart_are_refused(framework: str, way: str, said: str, tmp_path: Path) -> None:
    codes, output = ranks(tmp_path, framework, way)
    assert codes == [1, 1], output[-4000:]
    assert re.search(said, output), output[-4000:]
    assert "trained to the end" not in output
    assert "run.untracked" not in output, "a method that these scripts do not have"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ranks_that_train_together_are_let_through(framework: str, tmp_path: Path) -> None:
    codes, output = ranks(tmp_path, framework, "")
    assert codes == [0, 0], output[-4000:]
    assert output.count("trained to the end") == 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("way", "said"), WAYS)
def test_ranks_under_everstep_run_that_train_apart_are_refused_once(
    framework: str, way: str, said: str, tmp_path: Path
) -> None:
    kind = "loop" if framework == "accelerate" else ""
    preload = MODULES[framework][-1]
    folder = tmp_path / "run"
    played = play(folder, HERE / "run_apart.py", framework, way, folder, kind, preload=preload, restarts=2)
    assert played.code == 1, played.output[-4000:]
    assert re.search(said, played.output), played.output[-4000:]
    assert "trained to the end" not in played.output
    assert len(list(folder.glob("began-*"))) == SIZE, "each was started once"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_script_that_catches_the_refusal_fails_with_its_sentence_last(framework: str, tmp_path: Path) -> None:
    """Its exit code was 0 before, as if its run were complete."""
    codes, output = ranks(tmp_path, framework, "split", "caught")
    assert codes == [1, 1], output[-4000:]
    assert output.count("the script has caught LoopError") == 2
    last = [line for line in output.splitlines() if "everstep: refused: " in line]
    assert len(last) == 4, "first and last, of each rank"
    assert all("reads another sample than rank 0" in line for line in last)
