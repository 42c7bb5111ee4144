"""A script in the form of Lightning's own examples recovers in process, with two changed lines.

`fit/before.py` trains under torchrun; `fit/after.py` is the same file under `everstep-run`. It has what such scripts
have: a data module, the logger and the folder of checkpoints that Lightning chooses, the best checkpoint, a test.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from support.adapters.adapter_run import HERE
from support.adapters.unbroken_run import AGENT, SIZE, TORCHRUN, Played, differing
from support.adapters.unbroken_run import play as play_script

# Two runs, and the import of a framework, on a machine that does much else.
pytestmark = pytest.mark.timeout(600)

STEPS = 12  # 96 samples, 24 a step, 3 epochs
GUIDE = Path(__file__).parents[2] / "docs" / "how-to-convert.md"
PRELOAD = "lightning,lightning.pytorch,everstep.train.adapters.lightning"


def play(folder: Path, script: str, kill: str = "-", agent: str = AGENT) -> Played:
    driven = (folder, HERE / "fit" / script, kill, "--accelerator=cpu")
    return play_script(folder, HERE / "fit_driver.py", *driven, preload=PRELOAD, agent=agent)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    played = play(tmp_path_factory.mktemp("fit") / "undisturbed", "after.py")
    assert played.code == 0, played.output[-4000:]
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    assert [found["best"] for found in played.found] == [played.found[0]["best"]] * SIZE
    return played


def test_conversion_of_a_lightning_script_changes_two_lines_which_the_guide_shows() -> None:
    before, after = ((HERE / "fit" / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    found = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("---", "+++")]
    shown = [line for line in found if not line.startswith("@@")]
    assert len([line for line in shown if line.startswith("+")]) == 2
    assert "\n".join(shown) in GUIDE.read_text(), f"docs/how-to-convert.md is to show\n{shown}"


@pytest.mark.long
def test_lightning_script_as_it_was_trains_under_torchrun(tmp_path: Path) -> None:
    played = play(tmp_path / "before", "before.py", agent=TORCHRUN)
    assert played.code == 0, played.output[-4000:]
    assert [found["step"] for found in played.found] == [STEPS] * SIZE


@pytest.mark.long
@pytest.mark.parametrize(
    "kill",
    [
        "6:forward",  # in the middle of the second epoch; the new process would save into a folder of its own
        "0@6:forward",
        "8:validating",
        "0:forward",
    ],
)
def test_converted_lightning_script_whose_rank_is_killed_ends_as_the_undisturbed_one(
    kill: str, undisturbed: Played, tmp_path: Path
) -> None:
    played = play(tmp_path / "killed", "after.py", kill)
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert differing(found, reference) == []
    assert len(played.survivors) == SIZE - 1 + (kill == "0:forward"), "the others kept theirs"


@pytest.mark.long
def test_converted_lightning_script_whose_rank_is_killed_in_its_test_ends_the_same(
    undisturbed: Played, tmp_path: Path
) -> None:
    """There nobody repeats anything: all processes end, and new ones find the last commit."""
    played = play(tmp_path / "killed", "after.py", "12:testing")
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert differing(found, reference) == []
    assert len(played.steps) == SIZE, "nothing was trained again"
