"""Scripts of the shape of well-known public ones recover in process, with at most 12 changed lines.

`public/<name>/before.py` trains under torchrun; `after.py` is the same file under everstep-run.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from support.ordinary.ordinary_play import SIZE, difference, under_agents, under_torchrun

pytestmark = pytest.mark.timeout(360)

PUBLIC = Path(__file__).parent / "public"
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "how-to-convert.md"
NAMES = ("trainer", "gpt")
MOST = 12  # changed lines


def lines(name: str, which: str) -> list[str]:
    return (PUBLIC / name / f"{which}.py").read_text().splitlines()


def changed(before: list[str], after: list[str]) -> int:
    """Lines that were added, removed or replaced; a replaced one counts once."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


@pytest.mark.parametrize("name", NAMES)
def test_conversion_changes_at_most_twelve_lines_which_the_guide_shows(name: str) -> None:
    before, after = lines(name, "before"), lines(name, "after")
    assert 0 < changed(before, after) <= MOST
    found = difflib.unified_diff(before, after, n=0, lineterm="")
    shown = "\n".join(line for line in found if not line.startswith(("---", "+++", "@@")))
    for page in (GUIDE, ROOT / "README.md") if name == "trainer" else (GUIDE,):
        assert shown in page.read_text(), f"{page.relative_to(ROOT)} is to show\n{shown}"


@pytest.mark.parametrize("name", NAMES)
def test_script_as_it_was_trains_under_torchrun(name: str, tmp_path: Path) -> None:
    played = under_torchrun(tmp_path, PUBLIC / name / "before.py")
    assert played.codes == (0,) * SIZE, played.log[-3000:]
    assert (tmp_path / "snapshot.bin").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kills"), [("trainer", ("3:backward", "5:between", "9:backward")), ("gpt", ("3:backward", "6:gradients"))]
)
def test_converted_script_whose_rank_is_killed_ends_as_the_undisturbed_one(
    name: str, kills: tuple[str, ...], etcd_endpoint: str, tmp_path: Path
) -> None:
    script = PUBLIC / name / "after.py"
    (tmp_path / "undisturbed").mkdir()
    first = under_agents(tmp_path / "undisturbed", etcd_endpoint, script)
    assert not (found := difference(first, None, "", 0.0)), f"{found}\n{first.log[-3000:]}"
    for kill in kills:
        folder = tmp_path / kill.replace(":", "-")
        folder.mkdir()
        played = under_agents(folder, etcd_endpoint, script, kill)
        assert played.killed, played.log[-3000:]
        assert not (found := difference(played, first, "", 0.0)), f"{kill}: {found}\n{played.log[-3000:]}"
        assert played.began == SIZE + 1, f"{kill}: {played.began} processes took steps"
