"""Each Python example of docs/how-to-convert.md, and those of the session's contract, as written but for smaller
numbers and another folder, in the three processes of one `everstep-run`, of which one is killed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from support.ordinary.ordinary_play import difference, under_one_agent
from support.ordinary.pages import blocks, check_kills

pytestmark = pytest.mark.timeout(360)

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "how-to-convert.md"
REFERENCE = ROOT / "docs" / "reference"
KILLS = {
    "Gradient accumulation": ("5:backward2", "7:gradients"),
    "Gradient accumulation without a loader": ("5:backward2", "7:gradients"),
    "Early stopping": ("5:backward", "8:evaluate", "9:begin"),
    "Random seeds": ("5:backward", "6:optimizer"),
    "Variables that the loop changes": ("5:backward", "6:between"),
}
CONTRACT = {"The smallest script": REFERENCE / "session.md", "What the loop carries": REFERENCE / "session-tracking.md"}


def test_every_example_of_the_guide_is_run() -> None:
    assert GUIDE.read_text().count("```python") == len(KILLS)


def test_extras_that_the_guide_installs_are_there() -> None:
    (line,) = re.findall(r"pip install '\./worker\[(.*?)\]'.*", GUIDE.read_text())
    extras = tomllib.loads((ROOT / "worker/pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(line.split(",")) <= set(extras)


@pytest.mark.long_but("Random seeds")
@pytest.mark.parametrize("title", [*KILLS, *CONTRACT])
def test_example_whose_rank_is_killed_ends_as_the_undisturbed_one(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_STRICT", "1")  # no example carries a name that is not tracked
    (text,) = blocks(CONTRACT.get(title, GUIDE), title)
    check_kills(tmp_path, text, KILLS.get(title, ("0@5:backward", "6:optimizer")))


@pytest.mark.long
def test_early_stopping_stops_early_and_again_when_it_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (text,) = blocks(GUIDE, "Early stopping")
    script.write_text(text)
    steps = 0
    for _ in range(2):
        for path in tmp_path.glob("*.pt"):
            path.unlink()
        played = under_one_agent(tmp_path, script)
        assert not (found := difference(played, None, "", 0.0)), f"{found}\n{played.log[-3000:]}"
        reached = int(played.found[0]["step"])
        assert 0 < reached < 50 * 4
        assert reached == (steps or reached)
        steps = reached
