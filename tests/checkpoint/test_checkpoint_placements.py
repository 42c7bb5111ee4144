"""DTensors move between all placements, meshes and worlds: the cases of PyTorch's test_dtensor_resharding, which are
placements that change on one mesh, and meshes of one dimension that become two and the reverse. Here worlds of one to
four ranks load what each of them has saved; PyTorch's have one size.

Real processes over gloo: see `placements.py`.
"""

from functools import partial
from pathlib import Path

import pytest

from support.checkpoint import PROGRAMS
from support.processes.worlds_of_processes import results_of

run = partial(results_of, PROGRAMS / "placements.py", timeout=1500)


def moved(tmp_path: Path, shapes: str, saved: tuple[int, ...], loaded: tuple[int, ...]) -> int:
    """The number of tensors that came back right; fails with those that did not."""
    targets, sources = (",".join(map(str, sizes)) for sizes in (loaded, saved))
    root = tmp_path / "store"
    specs = [f"placements_save:{n}:{root}:shapes={shapes}:sizes={targets}" for n in saved]
    specs += [f"placements_load:{n}:{root}:shapes={shapes}:sizes={sources}" for n in loaded]
    worlds = run(tmp_path / "out", *specs)[len(saved) :]
    assert [r["wrong"][:3] for world in worlds for r in world] == [[]] * sum(loaded)
    return sum(world[0]["count"] for world in worlds)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_placements_of_pytorchs_table_move_between_worlds_of_one_to_four(tmp_path: Path) -> None:
    assert moved(tmp_path, "few", (1, 2, 3, 4), (1, 2, 3, 4)) > 2000


@pytest.mark.long
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("shapes", ["even", "uneven", "deep", "odd"])
def test_every_placement_on_every_mesh_moves_to_every_other(shapes: str, saved: int, tmp_path: Path) -> None:
    assert moved(tmp_path, shapes, (saved,), (1, 2, 3, 4)) > 1000


def test_tensor_whose_part_is_no_box_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    # Two columns of each row, which view(-1) calls one shard.
    (world,) = run(tmp_path / "out", f"scattered:2:{tmp_path / 'store'}")
    for rank in world:
        assert all(text.startswith("StateMismatch: t") for text in rank["told"]), rank
        assert all("a rank holds elements that are not neighbours" in text for text in rank["told"])
        assert (rank["same"], rank["steps"]) == (True, [1])


PLACES = ("", "", "", "/0")  # of the tensor in the state of each call


@pytest.mark.long
def test_tensor_that_some_ranks_cut_otherwise_than_fsdp_is_refused_on_all_of_them(tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"otherwise:6:{tmp_path / 'store'}")
    for number, rank in enumerate(world):
        *plain, union = rank["told"]
        says = "holds" if number > 3 else "another rank holds another part than FSDP would"
        assert all(
            text.startswith(f"StateMismatch: t{place}: {says}") for text, place in zip(plain, PLACES, strict=True)
        ), rank
        assert union.startswith("StateMismatch: t/x" if number > 3 else "CheckpointError: the state of another rank")
        assert (rank["same"], rank["steps"]) == (True, [1])
