"""Lightning under `everstep-run`: rank 1 of three is killed, the others keep their processes, and the run ends as the
undisturbed one, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.adapters import profiled
from support.adapters.adapter_run import HERE
from support.adapters.unbroken_run import SIZE, Played, differing
from support.adapters.unbroken_run import play as play_script

# Two runs, and the import of a framework, on a machine that does much else.
pytestmark = pytest.mark.timeout(600)

STEPS = 12  # 48 samples, 12 a step, 3 epochs
PRELOAD = "lightning.pytorch,everstep.train.adapters.lightning"


def play(folder: Path, kill: str = "", *, kind: str = "ddp", restarts: int = 1) -> Played:
    script = HERE / "run_lightning_rounds.py"
    return play_script(folder, script, folder, kind, kill, preload=PRELOAD, restarts=restarts)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    played = play(tmp_path_factory.mktemp("lightning") / "undisturbed")
    assert played.code == 0, played.output[-4000:]
    assert len(played.found) == SIZE
    return played


@pytest.mark.long
def test_profile_of_lightning_measures_each_rank(undisturbed: Played) -> None:
    profiled.check(undisturbed.folder, undisturbed.folder / "commits", [0, 1, 2])


@pytest.mark.long_but("5:forward1")
@pytest.mark.parametrize(
    "kill",
    [
        "5:forward1",  # in the second epoch, when the first half of the step's gradient is accumulated
        "6:validating",  # in the middle of an epoch
        "0:forward0",
        "7:forward0",
        "7:ended",  # optimizer and schedule have moved
        "8:validating",  # at an epoch's end
        "12:validating",  # behind the last step
    ],
)
def test_lightning_of_a_lost_peer_goes_on_in_its_process_and_ends_with_the_same_bits(
    kill: str, undisturbed: Played, tmp_path: Path
) -> None:
    played = play(tmp_path / "killed", kill)
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert differing(found, reference) == []
    assert len(played.survivors) == SIZE - 1 + (kill == "0:forward0"), "the others kept theirs"
    if kill[0] in "567":  # in the middle of the profile
        profiled.check(played.folder, played.folder / "commits", [0, 2], left_out=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "kill"),
    [
        ("saving", "7:forward0"),  # the last save of the run is made by all, or waits for those that do not make it
        ("saving_far", "8:validating"),  # all go back to the commit of step 5, and the save of step 6 is behind that
    ],
)
def test_lightning_that_saves_checkpoints_of_its_own_goes_on_in_its_process(
    kind: str, kill: str, undisturbed: Played, tmp_path: Path
) -> None:
    """What `ModelCheckpoint` keeps of its newest save is in no `state_dict`: a new process saved alone, and hung."""
    played = play(tmp_path / "killed", kill, kind=kind)
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert differing(found, reference) == []
    assert len(played.survivors) == SIZE - 1
    assert (tmp_path / "killed" / "saved" / "last.ckpt").exists()


@pytest.mark.long
def test_lightning_that_is_not_to_go_on_in_process_ends_as_the_undisturbed_run_by_a_restart(tmp_path: Path) -> None:
    """But for last bits: without a session a new DDP lays out its buckets anew."""
    first = play(tmp_path / "undisturbed", kind="restarted")
    played = play(tmp_path / "killed", "7:forward1", kind="restarted")
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert not played.survivors
    for found, reference in zip(played.found, first.found, strict=True):
        assert found["step"] == STEPS
        for name, value in reference["model"].items():
            torch.testing.assert_close(found["model"][name], value)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "said"), [("elastic", "in_process=False"), ("without", "callbacks=[…]")])
def test_lightning_that_cannot_go_on_in_process_is_refused_with_what_to_write(
    kind: str, said: str, tmp_path: Path
) -> None:
    played = play(tmp_path / "refused", kind=kind, restarts=0)
    assert played.code != 0
    assert said in played.output
    assert not played.found
