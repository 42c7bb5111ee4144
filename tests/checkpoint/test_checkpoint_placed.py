"""States with tensors of every placement (DTensor) come back equal, also where they are cut in another way, or are
refused by name before anything is saved. See `states_placed.py`."""

from functools import partial
from pathlib import Path

import pytest

from support.checkpoint import PROGRAMS
from support.processes.worlds_of_processes import results_of

PROGRAM = PROGRAMS / "states_placed.py"
run = partial(results_of, PROGRAM)

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "examples"), [(1, 100), (2, 60)])
def test_state_with_tensors_of_any_placement_comes_back_equal(ranks: int, examples: int, tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"check:{ranks}:{tmp_path / 'store'}:examples={examples}")
    assert [result["states"] for result in world] == [examples] * ranks


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("ranks", "examples"), [(1, 10_000), (2, 2_000)])
def test_ten_thousand_states_with_tensors_of_any_placement_come_back_equal(
    ranks: int, examples: int, tmp_path: Path
) -> None:
    (world,) = run(tmp_path / "out", f"check:{ranks}:{tmp_path / 'store'}:examples={examples}", timeout=7000)
    assert [result["states"] >= examples for result in world] == [True] * ranks


WORDS = {
    "sum": "a DTensor with Partial placement is a sum not yet made",
    "empty sum": "a DTensor with Partial placement", "parameter": "a DTensor with Partial placement",
    "type": "a torch.complex128 tensor", "freed": "the tensor's memory was freed",
    "twice": "several of its elements share one place",
}  # fmt: skip
PLACES = {"top": "odd: ", "nested": "odd/x/0: ", "module": "odd/p0: "}
ODD = [
    *[(kind, place) for kind in ("sum", "empty sum", "parameter", "type", "freed") for place in ("top", "nested")],
    ("sum", "module"), ("twice", "top"),
]  # fmt: skip


@pytest.mark.long
def test_cut_tensor_that_no_commit_holds_is_refused_by_name_before_anything_is_saved(tmp_path: Path) -> None:
    specs = [f"refused:{1 + i % 2}:{tmp_path / str(i)}:kind={k}:place={p}" for i, (k, p) in enumerate(ODD)]
    for (kind, place), world in zip(ODD, run(tmp_path / "out", *specs), strict=True):
        for result in world:
            assert [t.startswith(PLACES[place] + WORDS[kind]) for t in result["texts"]] == [True] * 2, (kind, result)
            assert result["written"] == []


def test_weights_that_were_tied_go_into_such_as_are_cut_in_two_ways(tmp_path: Path) -> None:
    pairs = ["cut+across", "across+copies", "cut+cut", "cut+plain", "plain+cut"]
    specs = [f"untied:2:{tmp_path / pair}:into={pair}" for pair in pairs]
    assert run(tmp_path / "out", *specs) == [[{"same": [True] * 4}] * 2] * len(pairs)
