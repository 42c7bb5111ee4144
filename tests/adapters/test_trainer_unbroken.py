"""Hugging Face Trainer under `everstep-run`: rank 1 of three is killed, the others keep their processes, and the run
ends as the undisturbed one, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.adapters import profiled
from support.adapters.adapter_run import HERE
from support.adapters.unbroken_run import SIZE, Played, differing
from support.adapters.unbroken_run import play as play_script

# Two runs, and the import of a framework, on a machine that does much else.
pytestmark = pytest.mark.timeout(600)

STEPS = 12  # 96 samples, 24 a step, 3 epochs
PRELOAD = "transformers.trainer,everstep.train.adapters.huggingface"


def play(folder: Path, kill: str = "", restarts: int = 1) -> Played:
    return play_script(folder, HERE / "run_trainer.py", folder, kill, preload=PRELOAD, restarts=restarts)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    played = play(tmp_path_factory.mktemp("trainer") / "undisturbed")
    assert played.code == 0, played.output[-4000:]
    assert len(played.found) == SIZE
    return played


COUNTS = """
import os
from pathlib import Path
from everstep.train.adapters.huggingface import EverstepCallback
from transformers import TrainingArguments

arguments = TrainingArguments("out", use_cpu=True, report_to="none")
Path(os.environ["LOCAL_RANK"]).write_text(f"{arguments.world_size}")
"""


@pytest.mark.long
def test_script_that_asks_for_the_world_size_before_it_trains_hears_that_of_the_whole_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTS)
    played = play_script(tmp_path / "counted", tmp_path / "train.py", preload=PRELOAD)
    assert played.code == 0, played.output[-4000:]
    assert [(tmp_path / "counted" / str(rank)).read_text() for rank in range(SIZE)] == [str(SIZE)] * SIZE


@pytest.mark.long
def test_profile_of_trainer_measures_each_rank(undisturbed: Played) -> None:
    profiled.check(undisturbed.folder, undisturbed.folder / "commits", [0, 1, 2])


@pytest.mark.long_but("7:evaluating")
@pytest.mark.parametrize(
    "kill",
    [
        "6:forward2",  # when the first half of the step's gradient is accumulated
        "7:evaluating",  # in the evaluation at the end of the second epoch
        "0:forward1",
        "5:begin",
        "5:end",  # the optimizer has stepped
        "3:evaluated",  # others may not have heard of its result
        "11:evaluating",  # behind the last step
    ],
)
def test_trainer_of_a_lost_peer_goes_on_in_its_process_and_ends_with_the_same_bits(
    kill: str, undisturbed: Played, tmp_path: Path
) -> None:
    played = play(tmp_path / "killed", kill)
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert differing(found, reference) == []
    assert len(played.steps) <= SIZE + 1, "one process was replaced"
    assert len(played.survivors) == SIZE - 1 + (kill == "0:forward1"), "the others kept theirs"
    assert "the last commit" not in played.output
    if kill[0] in "67":  # in the middle of the profile
        profiled.check(played.folder, played.folder / "commits", [0, 2], left_out=1)


@pytest.mark.long
def test_trainer_that_is_begun_without_the_callback_is_refused_by_name(tmp_path: Path) -> None:
    played = play(tmp_path / "plain", "plain", restarts=0)
    assert played.code != 0
    assert "callback.train(trainer)" in played.output
    assert not played.steps
