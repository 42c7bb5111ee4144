"""A script in the form of Hugging Face's `run_clm.py` recovers in process, with two changed lines.

`clm/before.py` trains under torchrun; `clm/after.py` is the same file under `everstep-run`.
"""

# ruff: noqa: PLC0415  imported where used: collecting these tests must not cost every run of the suite ten seconds

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest
import torch

from support.adapters.adapter_run import HERE
from support.adapters.unbroken_run import AGENT, SIZE, TORCHRUN, Played, differing
from support.adapters.unbroken_run import play as play_script

# Two runs, and the import of a framework, on a machine that does much else.
pytestmark = pytest.mark.timeout(600)

STEPS = 12  # 72 samples, 6 a step, a remainder
GUIDE = Path(__file__).parents[2] / "docs" / "how-to-convert.md"
PRELOAD = "transformers.trainer,everstep.train.adapters.huggingface"
WORDS = ("the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "and", "not", "runs", "sings", "old", "young")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of whole words, and two files of sentences made of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("clm")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", *WORDS])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder / "tokenizer")
    drawn = torch.randint(0, len(WORDS), (90, 16), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [" ".join(WORDS[i] for i in row) for row in drawn]
    (folder / "train.txt").write_text("\n".join(lines[:72]))
    (folder / "validation.txt").write_text("\n".join(lines[72:]))
    return folder


def play(folder: Path, script: str, data: Path, kill: str = "-", agent: str = AGENT) -> Played:
    arguments = {
        "tokenizer_name": data / "tokenizer", "train_file": data / "train.txt",
        "validation_file": data / "validation.txt",
        "config_overrides": "vocab_size=32,n_positions=16,n_embd=32,n_layer=2,n_head=2", "output_dir": folder / "out",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 1,
        "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 6, "logging_steps": 3,
    }  # fmt: skip
    flags = ["--do_train", "--do_eval", "--use_cpu", "--report_to=none", "--disable_tqdm=True"]
    flags += [f"--{name}={value}" for name, value in arguments.items()]
    driven = (folder, HERE / "clm" / script, kill, *flags)
    return play_script(folder, HERE / "clm_driver.py", *driven, preload=PRELOAD, agent=agent)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    played = play(folder, "after.py", data)
    assert played.code == 0, played.output[-4000:]
    assert [found["step"] for found in played.found] == [STEPS] * SIZE
    assert [step for step, _ in played.found[0]["evaluated"]] == [4, 8, 12, 12]
    return played


def test_conversion_of_a_trainer_script_changes_two_lines_which_the_guide_shows() -> None:
    before, after = ((HERE / "clm" / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    found = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("---", "+++")]
    shown = [line for line in found if not line.startswith("@@")]
    assert len([line for line in shown if line.startswith("+")]) == 2
    assert "\n".join(shown) in GUIDE.read_text(), f"docs/how-to-convert.md is to show\n{shown}"


@pytest.mark.long
def test_trainer_script_as_it_was_trains_under_torchrun(data: Path, tmp_path: Path) -> None:
    played = play(tmp_path / "before", "before.py", data, agent=TORCHRUN)
    assert played.code == 0, played.output[-4000:]
    assert [found["step"] for found in played.found] == [STEPS] * SIZE


@pytest.mark.long
@pytest.mark.parametrize(
    "kill",
    [
        "5:forward",
        "12:evaluating",  # behind the last step
        "0:forward",
        "8:evaluating",
    ],
)
def test_converted_trainer_script_whose_rank_is_killed_ends_as_the_undisturbed_one(
    kill: str, undisturbed: Played, data: Path, tmp_path: Path
) -> None:
    played = play(tmp_path / "killed", "after.py", data, kill)
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert differing(found, reference) == []
    assert len(played.steps) <= SIZE + 1, "one process was replaced"
    assert len(played.survivors) == SIZE - 1 + (kill == "0:forward"), "the others kept theirs"
    assert "the last commit" not in played.output
    results = json.loads((tmp_path / "killed" / "out" / "eval_results.json").read_text())
    assert results["eval_loss"] == undisturbed.found[0]["evaluated"][-1][1]


@pytest.mark.long
def test_converted_trainer_script_whose_rank_is_killed_after_the_training_ends_the_same(
    undisturbed: Played, data: Path, tmp_path: Path
) -> None:
    """There nobody repeats anything: all processes end, and new ones find the last commit."""
    played = play(tmp_path / "killed", "after.py", data, "12:after")
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    for found, reference in zip(played.found, undisturbed.found, strict=True):
        assert [name for name in differing(found, reference) if not name.startswith(".evaluated")] == []
    assert len(played.steps) == SIZE, "nothing was trained again"
    results = json.loads((tmp_path / "killed" / "out" / "eval_results.json").read_text())
    assert results["eval_loss"] == undisturbed.found[0]["evaluated"][-1][1]
