"""Each "after" of docs/how-to-restructure.md, in three processes of which one is killed, ends as undisturbed; and
`everstep rehearse` finds what is wrong with each "before"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.adapters.adapter_run import HERE
from support.adapters.unbroken_run import differing, play
from support.ordinary.ordinary_play import SIZE
from support.ordinary.pages import SMALLER, blocks, check_kills
from support.rehearse import rehearse as play_rehearsal

pytestmark = pytest.mark.timeout(360)

PAGE = Path(__file__).parents[2] / "docs" / "how-to-restructure.md"
PRELOAD = "accelerate,accelerate.data_loader,everstep.train.adapters.accelerate"
ACCELERATE = {"The number of processes with Accelerate": 12, "Early stopping with Accelerate": 12}  # steps in all
KILLS = {
    "Hidden state of each rank": ("5:backward", "6:optimizer"),
    "Environments": ("5:backward", "6:optimizer"),
    "A batch that is fetched a step early": ("5:backward", "6:between"),
    "A while loop with its evaluation on top": ("5:backward", "5:evaluate"),
    "A script's own resume": ("6:backward", "7:optimizer"),
    "Another optimizer from some step on": ("4:backward", "5:optimizer", "7:backward"),
    "Masks of weights": ("6:backward", "7:optimizer"),
}
# By title, a part of what a rehearsal says of "before".
FOUND = {
    "Hidden state of each rank": "hidden|model",
    "Environments": "environment|policy",
    "A batch that is fetched a step early": "waiting|model",
    "A while loop with its evaluation on top": r"run\.evaluate\(fn, every=N\)",
    "A script's own resume": "first",
    "Another optimizer from some step on": "SGD.*not tracked|optimizer",
    "Masks of weights": "masks|model",
    "The number of processes with Accelerate": "seen",
    "Early stopping with Accelerate": r"check_trigger\(…\) \(train\.py:\d+\) is in the body.*The break in line \d+",
}


def rehearse(folder: Path, script: str) -> list[str]:
    """What is certain of what is found: its text, and the names in it."""
    (folder / "train.py").write_text(script)
    done = play_rehearsal(folder, "--ranks", "2", "--steps", "12", "--kill", "rank", "--limit", "100", seconds=300)
    return [f"{found['text']} {found['names']}" for found in done.findings if found["certain"]]


def test_every_section_of_the_page_is_run() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [*KILLS, *ACCELERATE] == list(FOUND)
    others = ("how-to-convert.md", "reference/session.md", "reference/session-tracking.md")
    shown = text + "".join((PAGE.parent / name).read_text() for name in others)
    assert [change for change in SMALLER if change not in shown] == []
    assert text.count("\nBefore:\n\n```python") == len(FOUND) == text.count("```python") / 2


@pytest.mark.long
@pytest.mark.parametrize("title", KILLS)
def test_after_whose_rank_is_killed_ends_as_undisturbed(title: str, tmp_path: Path) -> None:
    _, text = blocks(PAGE, title)
    check_kills(tmp_path, text, KILLS[title])


@pytest.mark.long
@pytest.mark.parametrize("title", ACCELERATE)
def test_after_with_accelerate_whose_rank_is_killed_ends_as_undisturbed(title: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    _, text = blocks(PAGE, title)
    script.write_text(text)
    played = {
        kill: play(tmp_path / name, HERE / "loop_driver.py", tmp_path / name, script, kill, preload=PRELOAD)
        for name, kill in (("undisturbed", "-"), ("killed", "5:backward"))
    }
    for one in played.values():
        assert one.code == 0, one.output[-4000:]
        assert [found["step"] for found in one.found] == [ACCELERATE[title]] * SIZE
    assert (tmp_path / "killed" / "killed").exists()
    for found, wanted in zip(played["5:backward"].found, played["-"].found, strict=True):
        assert differing(found, wanted) == []


# One that is refused at once is played in each run: it takes seconds.
AT_ONCE = "A while loop with its evaluation on top"


@pytest.mark.parametrize("title", [t if t == AT_ONCE else pytest.param(t, marks=pytest.mark.long) for t in FOUND])
def test_rehearsal_finds_what_is_wrong_with_before(title: str, tmp_path: Path) -> None:
    before, _ = blocks(PAGE, title)
    found = rehearse(tmp_path, before)
    assert any(re.search(FOUND[title], one) for one in found), found


@pytest.mark.long
@pytest.mark.parametrize("title", FOUND)
def test_rehearsal_finds_nothing_wrong_with_after(title: str, tmp_path: Path) -> None:
    _, after = blocks(PAGE, title)
    assert rehearse(tmp_path, after) == []
