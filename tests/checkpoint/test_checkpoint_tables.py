"""The cases of PyTorch's `test/distributed/checkpoint`, with worlds that change, which its own have not.

| there | here |
|---|---|
| test_dtensor_resharding: placements and meshes that change | test_checkpoint_placements.py |
| test_fsdp_ep: experts beside FSDP; it looks at the names alone | `experts` below, saved and loaded; test_checkpoint_union.py |
| test_pipeline: stages, loaded by FSDP | `stages` to each other division and back |
| test_hsdp_checkpoint: HSDP, even and uneven, to itself and to FSDP | the long table, and `hsdp` below |
| test_fsdp_tp_checkpoint_conversion: FSDP to tensor parallelism | the long table, in all directions; test_checkpoint_union.py |
| test_fine_tuning: frozen layers from another checkpoint, restarted | the test of a tuned model |
| test_fsspec: through fsspec; overwriting; a write that fails | the test of another's file system: a second commit leaves the first as it is; tests/storage has failed writes |
| test_state_dict_utils: gather, by some ranks, with lists and dicts, onto the CPU | the test of ranks that read alone |
| its copies in shared or pinned memory | none: what a save copies is its own (test_checkpoint_worlds.py has parameters that change while they are written) |
| its BytesIO in a state | refused by name (test_checkpoint_states.py): bytes are kept |

Real processes over gloo: see `tables.py` and `divisions.py`.
"""  # noqa: E501

from functools import partial
from pathlib import Path

import pytest

from support.checkpoint import PROGRAMS
from support.processes.worlds_of_processes import results_of

run = partial(results_of, PROGRAMS / "tables.py")
divide = partial(results_of, PROGRAMS / "divisions.py", timeout=1500)

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
@pytest.mark.parametrize("which", ["perceptron", "even", "uneven"])
def test_any_division_of_a_model_loads_into_any_other(which: str, tmp_path: Path) -> None:
    root, sizes = tmp_path / which, (1, 3) if which == "perceptron" else (2, 4)
    saves = [f"models_save:{n}:{root}:which={which}" for n in sizes]
    results = run(tmp_path / "out", *saves, *(f"models_load:{n}:{root}" for n in sizes))
    (digest,) = {digest for world in results[:2] for result in world for digest in result.values()}
    for world in results[2:]:
        assert {found for result in world for found in result.values()} == {digest}


def divided(tmp_path: Path, saved: tuple[int, ...], loaded: tuple[int, ...]) -> None:
    root = tmp_path / "store"
    specs = [f"divisions_save:{n}:{root}" for n in saved] + [f"divisions_load:{n}:{root}" for n in loaded]
    worlds = divide(tmp_path / "out", *specs)
    want = worlds[0][0]["told"]
    assert all(result["told"] == want for world in worlds[: len(saved)] for result in world)
    for world in worlds[len(saved) :]:
        for case in world[0]["told"]:
            parts = [result["told"][case] for result in world]
            assert all(want[name] == digest for part in parts for name, digest in part.items()), (case, len(world))
            assert {name for part in parts for name in part} == want.keys(), (case, len(world))


@pytest.mark.long
def test_stages_experts_and_shards_of_four_ranks_load_into_each_other_in_worlds_of_one_to_four(tmp_path: Path) -> None:
    divided(tmp_path, (4,), (1, 2, 3, 4))


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_stages_experts_and_shards_of_any_world_load_into_each_other_in_any(tmp_path: Path) -> None:
    divided(tmp_path, (1, 2, 3), (1, 2, 3, 4))


@pytest.mark.long
def test_tuned_model_has_its_body_from_one_checkpoint_and_goes_on_from_another(tmp_path: Path) -> None:
    root = tmp_path / "store"
    trained, *tuned = divide(tmp_path / "out", *(f"{'tune' if n else 'pretrained'}:{n or 2}:{root}" for n in range(5)))
    want = {result["on"] for world in tuned for result in world}
    assert len(want) == 1, "the world's size makes no difference"
    for size, world in enumerate(tuned, 1):
        for result in world:
            assert (result["body"], result["head"]) == (trained[0]["body"], True)
            assert len(result["resumed"]) == 2 * size, "of each world before it, all of the model and the head alone"
            assert set(result["resumed"].values()) == want


def test_some_ranks_read_a_sharded_state_whole_and_alone(tmp_path: Path) -> None:
    worlds = divide(tmp_path / "out", *(f"gathered:{n}:{tmp_path / str(n)}" for n in (1, 2, 3, 4)))
    assert all(result["same"] for world in worlds for result in world)


@pytest.mark.long
def test_sharded_state_passes_through_a_file_system_that_only_fsspec_knows(tmp_path: Path) -> None:
    schemes = {1: "pieces", 2: "inplace", 3: "pieces", 4: "inplace"}
    specs = (f"elsewhere:{n}:{tmp_path / str(n)}:scheme={scheme}" for n, scheme in schemes.items())
    worlds = divide(tmp_path / "out", *specs)
    assert all(result["same"] == [True] * 3 for world in worlds for result in world)
