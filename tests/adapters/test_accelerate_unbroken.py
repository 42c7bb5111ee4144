"""A loop over what Accelerate prepared, under `everstep-run`: rank 1 of three is killed, the others keep their
processes, and the run ends as the undisturbed one, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.adapters import profiled
from support.adapters.adapter_run import HERE
from support.adapters.unbroken_run import SIZE, TORCHRUN, Played, differing
from support.adapters.unbroken_run import play as play_script

# Two runs, and the import of a framework, on a machine that does much else.
pytestmark = pytest.mark.timeout(600)

STEPS = 12  # 64 samples, 12 a step, the last step of each of 2 epochs with 4
PRELOAD = "accelerate,accelerate.data_loader,everstep.train.adapters.accelerate"

OF_STEP = (
    "everstep: 3 processes x 2 samples x 2 batches = 12 samples a step: batch_size=2 is that of one process, as under"
    " torchrun. A prepared schedule moves 3 times a step. For another batch docs/how-to-restructure.md has the form"
    ' under "The number of processes with Accelerate"'
)


def play(folder: Path, kill: str = "", *, kind: str = "train", **how: object) -> Played:
    return play_script(folder, HERE / "run_accelerate_rounds.py", folder, kind, kill, preload=PRELOAD, **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    played = play(tmp_path_factory.mktemp("accelerate") / "undisturbed")
    assert played.code == 0, played.output[-4000:]
    assert len(played.found) == SIZE
    assert [found["evaluated"][:2] for found in played.found] == [[STEPS, 20]] * SIZE, "each sample once"
    for found in played.found[1:]:
        assert differing(found, played.found[0]) == []
    return played


@pytest.mark.long
def test_profile_of_an_accelerate_loop_measures_each_rank(undisturbed: Played) -> None:
    profiled.check(undisturbed.folder, undisturbed.folder / "commits", [0, 1, 2])


@pytest.mark.long_but("4:forward1")
@pytest.mark.parametrize(
    "kill",
    [
        "4:forward1",  # when the first half of the step's gradient is accumulated
        "6:evaluating",
        "0:forward0",
        "11:forward1",  # of the step that has fewer samples
        "7:end1",  # optimizer and schedule have moved
        "12:evaluating",  # behind the last step
    ],
)
def test_accelerate_loop_of_a_lost_peer_goes_on_in_its_process_and_ends_with_the_same_bits(
    kill: str, undisturbed: Played, tmp_path: Path
) -> None:
    played = play(tmp_path / "killed", kill)
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert differing(found, reference) == []
    assert len(played.survivors) == SIZE - 1 + (kill == "0:forward0"), "the others kept theirs"
    assert "the last commit" not in played.output
    assert played.output.count("is that of one process") == played.output.count(OF_STEP) == 1
    if kill[0] in "67":  # in the middle of the profile
        profiled.check(played.folder, played.folder / "commits", [0, 2], left_out=1)


@pytest.mark.long
def test_accelerate_loop_whose_order_has_a_seed_of_its_own_trains_too(tmp_path: Path) -> None:
    """As the reference shows it: under torchrun a loader that shuffles has to have one. Preparing it anew for each
    world gave it another sampler, and that was refused as a change of the script's."""
    played = play(tmp_path / "seedable", "4:forward1", kind="seedable")
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "seedable" / "killed").exists()
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    assert len(played.survivors) == SIZE - 1


@pytest.mark.long
def test_accelerate_loop_under_torchrun_takes_the_same_steps(undisturbed: Played, tmp_path: Path) -> None:
    played = play(tmp_path / "torchrun", agent=TORCHRUN, restarts=0)
    assert played.code == 0, played.output[-4000:]
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    assert played.output.count("is that of one process") == played.output.count(OF_STEP) == 1
    assert played.found[0]["schedule"]["last_epoch"] == undisturbed.found[0]["schedule"]["last_epoch"]
    assert [found["evaluated"][:2] for found in played.found] == [[STEPS, 20]] * SIZE


@pytest.mark.long
@pytest.mark.parametrize(("kind", "said"), [("batches", "write `run.train(learn)`"), ("plain", "run.train(function)")])
def test_accelerate_loop_whose_body_is_no_function_is_refused_with_the_call_to_write(
    kind: str, said: str, tmp_path: Path
) -> None:
    played = play(tmp_path / "refused", kind=kind, restarts=0)
    assert played.code != 0
    assert said in played.output
    assert not played.steps
