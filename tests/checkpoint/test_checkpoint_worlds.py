"""State saved by one world is the same state, bit for bit, in a world of any other size and sharding (failure mode 83).

Real processes over gloo: see `worlds.py`. Each test starts one program, which runs its worlds one after the other.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

import everstep
from support.checkpoint import PROGRAMS
from support.processes.worlds_of_processes import results_of

PROGRAM = PROGRAMS / "worlds.py"
run = partial(results_of, PROGRAM)
LOADED = (1, 3, 7, 16)

pytestmark = pytest.mark.timeout(300)


def sizes(root: Path) -> list[int]:
    return [p.stat().st_size for p in sorted(root.glob("data/*/*.safetensors"))]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_state_saved_by_eight_ranks_loads_bit_identical_on_other_numbers_and_kinds(kind: str, tmp_path: Path) -> None:
    # Case 83: replicated and sharded state, with Adam's; then each loaded as the other.
    root, other = tmp_path / "store", {"ddp": "fsdp", "fsdp": "ddp"}[kind]
    worlds = [f"load:{n}:{root}:kind={kind}:far=yes" for n in LOADED] + [f"load:3:{root}:kind={other}"]
    worlds += [f"load:7:{root}:kind={kind}"]
    saved, *loaded = run(tmp_path / "out", f"save:8:{root}:kind={kind}", *worlds)
    assert len(sizes(root)) == 8
    if kind == "ddp":  # FSDP2 itself decides how sharded tensors are divided
        assert max(sizes(root)) / min(sizes(root)) < 1.1, "each of eight ranks writes about an eighth, headers included"
    for world in loaded:
        assert {(r["step"], r["digest"]) for r in world} == {(3, saved[0]["digest"])}, len(world)


@pytest.mark.long
def test_state_that_tensor_parallelism_has_cut_is_written_once_by_all_replicas_and_loads_elsewhere(
    tmp_path: Path,
) -> None:
    # A replica's own mesh does not tell that other replicas hold the same.
    root = tmp_path / "store"
    specs = [f"load:{n}:{root}:kind={kind}" for n, kind in ((4, "tensor2"), (6, "tensor3"), (2, "ddp"), (2, "fsdp"))]
    saved, *loaded = run(tmp_path / "out", f"save:4:{root}:kind=tensor2", *specs)
    assert len(sizes(root)) == 4
    assert max(sizes(root)) / min(sizes(root)) < 1.2, "replicas write an even part each"
    for world in loaded:
        assert {(r["step"], r["digest"]) for r in world} == {(3, saved[0]["digest"])}, len(world)


@pytest.mark.long
def test_world_that_only_looks_has_the_same_state_and_leaves_no_trace(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (saved,) = run(tmp_path / "out", f"save:2:{root}:kind=fsdp")
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    for world in run(tmp_path / "looks", *[f"look:{n}:{root}:kind={kind}" for n, kind in ((3, "fsdp"), (2, "ddp"))]):
        assert {(r["step"], r["digest"]) for r in world} == {(3, saved[0]["digest"])}, len(world)
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


@pytest.mark.long_but("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_of_one_row_and_empty_ones_come_back(ranks: int, tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"thin:{ranks}:{tmp_path / 'store'}")
    assert world == [{"same": True}] * ranks


@pytest.mark.long
def test_rank_that_waits_for_ranks_which_do_not_call_says_so(tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"left_out:2:{tmp_path / 'store'}")
    assert world[0]["told"] == [
        "rank 0 has waited 0 s for the other ranks: every rank calls restore(), should_save(), save() and load(). "
        "If only some do, take `if rank == 0` away"
    ]


@pytest.mark.long
def test_every_save_of_ranks_that_are_faster_than_the_store_is_committed(tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"hurried:2:{tmp_path / 'store'}")
    assert world == [{"steps": list(range(8, 0, -1))}] * 2


@pytest.mark.long_but("weights")
@pytest.mark.parametrize("what", ["value", "generator", "weights", "expert", "missing"])
def test_state_that_is_each_ranks_own_is_refused_by_name_and_never_committed(what: str, tmp_path: Path) -> None:
    (world,) = run(tmp_path / "out", f"differ:2:{tmp_path / 'store'}:what={what}")
    first, second = world
    assert first["outcomes"] == ["Committed", "StateMismatch", "StateMismatch"]
    assert second["outcomes"] == ["Written"] * 3, "it is rank 0 that compares"
    assert first["text"].startswith("mine/own: not the same on all 2 ranks")
    assert "everstep.RngState" in first["text"]
    assert first["latest"] == second["latest"] == 1


@pytest.mark.long_but("moments-optimizer")
@pytest.mark.parametrize(("what", "key"), [("parameters", "model"), ("moments", "optimizer"), ("rate", "optimizer")])
def test_ranks_that_differ_from_the_third_save_on_make_no_third_commit(what: str, key: str, tmp_path: Path) -> None:
    # What is compared byte by byte are the saves 1, 2, 4, 8, …
    (world,) = run(tmp_path / "out", f"drift:2:{tmp_path / 'store'}:what={what}")
    assert world[0]["steps"] == [2, 1]
    assert world[0]["texts"][0].startswith(
        f"{key}: not the same on all 2 ranks (in the save of step 2 they still were), and a commit has one value for "
        "all: step 3 was not saved"
    )


@pytest.mark.parametrize(("who", "first", "other"), [(1, 3, 4), (0, 4, 3)])
def test_save_that_one_rank_left_out_is_named_and_no_commit_holds_two_steps(
    who: int, first: int, other: int, tmp_path: Path
) -> None:
    (world,) = run(tmp_path / "out", f"skip:2:{tmp_path / 'store'}:who={who}")
    texts = world[0]["texts"]
    assert len(texts) == 3 - (who == 0), "each later save fails too"
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"rank 1 saved step {other} where rank 0 saved step {first}: no commit was made")
    assert "all ranks" in texts[0]
    assert world[1]["texts"] == []
    assert [r["steps"] for r in world] == [[2, 1]] * 2


@pytest.mark.long
def test_replicated_state_is_read_once_by_the_world_and_not_once_by_each_rank(tmp_path: Path) -> None:
    root = tmp_path / "store"
    worlds = [f"load:{n}:{root}:kind=ddp:far=yes" for n in (1, 2, 4)]
    _, *loaded = run(tmp_path / "out", f"save:2:{root}:kind=ddp", *worlds)
    stored = sum(sizes(root))
    for world in loaded:
        read = [r["read"] for r in world]
        assert sum(read) == stored, "every byte once"
        assert max(read) <= stored / len(read) + 2 * 4096, "even but for a chunk"


@pytest.mark.long
def test_ranks_that_share_a_page_cache_each_read_all_of_a_replicated_state(tmp_path: Path) -> None:
    root = tmp_path / "store"
    saved, loaded = run(tmp_path / "out", f"save:2:{root}:kind=ddp", f"load:3:{root}:kind=ddp")
    assert [r["read"] for r in loaded] == [sum(sizes(root))] * 3
    assert {r["digest"] for r in loaded} == {saved[0]["digest"]}


@pytest.mark.long
def test_sharded_state_is_read_by_those_who_need_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    worlds = run(tmp_path / "out", f"save:4:{root}:kind=fsdp", *[f"load:{n}:{root}:kind=fsdp" for n in (2, 4)])
    stored = sum(sizes(root))
    for world in worlds[1:]:
        assert max(r["read"] for r in world) < 1.7 * stored / len(world), "its own part, and chunks on the borders"


@pytest.mark.long_but("ddp")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_restored_training_goes_on_bit_identical(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    *_, world = run(tmp_path / "out", f"save:2:{root}:kind={kind}", f"load_and_train:2:{root}:kind={kind}")
    assert [r["same"] for r in world] == [True, True]


@pytest.mark.long
def test_tensors_of_every_placement_move_between_meshes(tmp_path: Path) -> None:
    # Rows, columns, both, HSDP (replicas of shards), the same axis twice, all of it everywhere; f32 and bf16.
    root = tmp_path / "store"
    meshes = [(2, 4), (4, 2), (3, 2), (1, 1), (1, 5)]
    specs = [f"grid:{a * b}:{root}:rows={a}:columns={b}:seed={n + 1}" for n, (a, b) in enumerate(meshes)]
    saved, *loaded = run(tmp_path / "out", *specs)
    assert saved[0]["step"] is None
    for world in loaded:
        assert {(r["step"], r["digest"], r["sharded"]) for r in world} == {(1, saved[0]["digest"], True)}


@pytest.mark.long
def test_axes_that_do_not_divide_under_fsdp_over_tensor_parallelism_come_back_at_any_size(tmp_path: Path) -> None:
    # Of 7 rows over 3 x 2 ranks torch's own plan gives the last row to another rank than FSDP2 does.
    root = tmp_path / "store"
    meshes = [(3, 2), (4, 2), (2, 3), (2, 1), (1, 1)]
    worlds = run(tmp_path / "out", *(f"uneven:{a * b}:{root}:rows={a}:columns={b}" for a, b in meshes))
    for n, (world, (a, b)) in enumerate(zip(worlds, meshes, strict=True)):
        assert world == [{"step": 1 if n else None, "same": True}] * (a * b), (a, b)
    again = tmp_path / "again"  # and from one rank to six
    *_, six = run(tmp_path / "out2", f"uneven:1:{again}:rows=1:columns=1", f"uneven:6:{again}:rows=3:columns=2")
    assert six == [{"step": 1, "same": True}] * 6


@pytest.mark.long
@pytest.mark.parametrize("damage", ["flip", "delete", "swap"])
def test_damage_to_any_ranks_shard_falls_back_one_commit_on_every_rank_and_names_the_file(
    damage: str, tmp_path: Path
) -> None:
    # Cases 73 and 74, with another number of ranks than saved.
    root = tmp_path / "store"
    run(tmp_path / "save", f"steps:3:{root}:last=2")
    newest = sorted(root.glob("data/*-00000002/*.safetensors"))
    assert len(newest) == 3
    copies = []
    for number, shard in enumerate(newest):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(root, copy)
        damaged = copy / shard.relative_to(root)
        data = bytearray(damaged.read_bytes())
        match damage:
            case "flip":
                data[len(data) // 2] ^= 1
                damaged.write_bytes(data)
            case "delete":
                damaged.unlink()
            case _:
                damaged.write_bytes(newest[(number + 1) % 3].read_bytes())
        copies.append((copy, shard.name))
    worlds = run(tmp_path / "load", *[f"restore:2:{copy}" for copy, _ in copies])
    for world, (_, name) in zip(worlds, copies, strict=True):
        assert [(r["step"], r["values"], r["epoch"]) for r in world] == [(1, [1.0], 1)] * 2
        assert any(name in text for r in world for text in r["told"]), (name, world)


@pytest.mark.long
def test_ranks_that_want_different_things_each_read_their_own(tmp_path: Path) -> None:
    root = tmp_path / "store"
    *_, world = run(tmp_path / "out", f"steps:2:{root}:last=1", f"restore:2:{root}:odd=less")
    assert [(r["step"], r["values"]) for r in world] == [(1, [1.0]), (1, [])]
    assert world[0]["read"] == sum(sizes(root))
    assert world[1]["read"] == 0


@pytest.mark.long
def test_state_that_does_not_fit_on_one_rank_stops_them_all(tmp_path: Path) -> None:
    root = tmp_path / "store"
    *_, world = run(tmp_path / "out", f"steps:2:{root}:last=1", f"restore:2:{root}:odd=more")
    assert "no 'unknown'" in world[1]["error"]
    assert "another rank" in world[0]["error"], "it must not train on alone"


def test_parameter_that_diverged_on_one_rank_makes_no_commit(tmp_path: Path) -> None:
    # Case 77: each rank looks at what it writes.
    root = tmp_path / "store"
    diverged, loaded = run(tmp_path / "out", f"diverge:3:{root}", f"restore:1:{root}:odd=none")
    assert "hold NaN or infinity" in diverged[0]["error"]
    assert loaded[0]["error"], "the commit is of step 1, and of another state"
    assert [json.loads(p.read_text().splitlines()[0]).get("step") for p in sorted(root.glob("log/*"))][:2] == [None, 1]


@pytest.mark.long
def test_sharded_parameters_that_change_during_the_write_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    # Case 82; a hash of the logical state proves it.
    (world,) = run(tmp_path / "out", f"mutate:2:{tmp_path / 'store'}")
    assert [(r["same"], r["changed"]) for r in world] == [(True, True)] * 2


@pytest.mark.long
def test_folder_that_ranks_do_not_share_is_named_before_the_first_step(tmp_path: Path) -> None:
    # A path on each node's own disk. One of them holds a log of its own, with a record of the same number.
    root = tmp_path / "store"
    old = everstep.Checkpointer(f"{root}-1", on_event=lambda kind, **_: None)
    old.restore({"epoch": 0})
    old.close()
    apart, some, one = run(tmp_path / "out", f"apart:2:{root}:at=1", f"apart:3:{root}:at=2", f"apart:3:{root}:at=3")
    for world, odd in ((apart, 1), (some, 2)):
        assert [f"rank {odd}" in r["error"] and "not shared" in r["error"] for r in world] == [True] * len(world)
        assert max(r["seconds"] for r in world) < 30
    assert one == [{}, {}, {}]


@pytest.mark.long
def test_sharded_state_of_an_optimizer_goes_by_names_where_the_order_changed(tmp_path: Path) -> None:
    worlds = run(tmp_path / "out", *(f"permuted:2:{tmp_path / kind}:kind={kind}" for kind in ("fsdp", "ddp")))
    assert [r["same"] for world in worlds for r in world] == [[True, True]] * 4
