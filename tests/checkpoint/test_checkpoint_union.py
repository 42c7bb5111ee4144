"""Ranks that hold different names commit the union of them, and each gets its own back, in whatever division.

Real processes over gloo: see `unions.py`. The cases of pipeline stages, of experts beside FSDP, of HSDP and of FSDP
with tensor parallelism are those that PyTorch tests its distributed checkpoint with (test_pipeline, test_fsdp_ep,
test_hsdp_checkpoint, test_fsdp_tp_checkpoint_conversion).
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint import PROGRAMS
from support.processes.worlds_of_processes import results_of

PROGRAM = PROGRAMS / "unions.py"
run = partial(results_of, PROGRAM)
SAVED = {"experts": 4, "stages": 4, "pipeline": 4, "sharded": 4, "alike": 4, "plain": 3}
LOADED = {
    "experts": (2, 1, 3),
    "stages": (1, 4),
    "pipeline": (1, 2),
    "sharded": (2, 3),
    "alike": (1, 3),
    "plain": (2, 4),
}

pytestmark = pytest.mark.timeout(300)


def together(world: list[dict[str, Any]]) -> dict[str, str]:
    """The digest of each name, which all ranks that hold it have told alike."""
    found: dict[str, str] = {}
    for result in world:
        for name, digest in result["told"].items():
            assert found.setdefault(name, digest) == digest, name
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", SAVED)
def test_what_ranks_hold_under_different_names_is_saved_once_and_comes_back_in_any_division(
    kind: str, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    sizes = (SAVED[kind], *LOADED[kind])
    specs = [f"{'give' if n else 'keep'}:{size}:{root}:kind={kind}" for n, size in enumerate(sizes)]
    saved, *loaded = run(tmp_path / "out", *specs)
    assert [r["outcome"] for r in saved] == ["Committed"] + ["Written"] * (len(saved) - 1)
    want = together(saved)
    for number, world in enumerate(loaded):
        assert together(world) == want, len(world)
        assert {(r["same"], r["at"]) for r in world} == {(True, 4 if number else 3)}
    if kind == "stages":  # each stage has two holders
        records = (json.loads(path.read_text().splitlines()[0]) for path in sorted((root / "log").iterdir()))
        shards = (record.get("shards", []) for record in records)  # those of a deleted commit are compacted
        parts = [shard["bytes"] for shard in next(found for found in shards if len(found) == SAVED[kind])]
        assert max(parts[0], parts[2]) / min(parts[0], parts[2]) < 1.3, "the holders of a stage write an even part each"


@pytest.mark.long
def test_union_that_is_not_one_state_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"refuse:2:{tmp_path / 'store'}")
    first, second = world
    for case, result in {**first, **second}.items():
        assert not result["latest"], case
    for case in ("other_content", "one_name"):
        told = "u/both of ranks 0, 1: rank 1 holds it with other content than rank 0"
        assert all(text.startswith(told) for text in first[case]["texts"]), first[case]
    assert second["other_content"]["texts"][0] == "Written", "it is rank 0 that compares"
    assert "that rank says why" in second["other_content"]["texts"][1]
    for rank in world:
        assert rank["other_shape"]["texts"][0].startswith("u/both: rank 0 holds F32 (3,), rank 1 F32 (4,)")
        assert rank["torn"]["texts"][0].startswith("u/t: its pieces hold 2 of 4 elements")
        assert "o: parameter 0 of group 0, of shape (2,), belongs to no module" in rank["nameless"]["texts"][0]
        assert rank["late"]["texts"][0].startswith("u: marked with everstep.Union now")
    assert first["other_value"]["texts"][0].startswith(
        "o/param_groups/m.layers.0.bias/lr: rank 0 has 0.1, rank 1 has 0.2"
    )
    assert first["other_kind"]["texts"][0].startswith("u: rank 0 holds a stateful, rank 1 a value")
    assert first["marked_once"]["texts"][0].startswith("u: not the same on all 2 ranks")
    assert second["cannot"]["texts"][0].startswith("u/a: a builtins.object cannot be in a checkpoint")
    assert "that rank says why" in first["cannot"]["texts"][0]


def test_names_that_a_commit_lacks_or_that_no_rank_asks_for_are_told(tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"misfit:2:{tmp_path / 'store'}")
    first, second = world
    assert second["more"].startswith(
        "u/new: is in the state passed in, and not in the commit; under u it has both, more0"
    )
    assert "another rank's state does not fit" in first["more"]
    for rank in world:
        assert rank["less"].startswith("u/more1: in the commit, and no rank asks for it")
        assert {v for _, values in rank["less values"] + rank["more values"] for v in values} == {0.0}, (
            "nothing was filled"
        )
        assert rank["swapped"] == "restored"
    assert first["swapped values"] == [["both", [3.0] * 3], ["more0", [2.0] * 3], ["own1", [1.0] * 3]]


@pytest.mark.long_but("hsdp")
@pytest.mark.parametrize("saved", ["hsdp", "fsdp_tp"])
def test_state_on_a_mesh_of_two_dimensions_loads_on_others(saved: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    kinds = [(4, saved), (4, "fsdp_tp" if saved == "hsdp" else "hsdp"), (2, "fsdp_tp"), (3, "fsdp"), (1, "none")]
    first, *others = run(tmp_path / "out", *[f"converted:{size}:{root}:kind={kind}" for size, kind in kinds])
    assert {r["at"] for r in first} == {None}
    for world in others:
        assert {(r["at"], r["digest"]) for r in world} == {(1, first[0]["digest"])}, len(world)
