"""examples/finetune: frozen weights stay as they are, commits hold adapters only, and a kill leaves no trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import everstep
from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, script, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "finetune"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of examples/gpt, as they begin."""
    torch.manual_seed(1)
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(script("gpt").Transformer().state_dict(), file)
    return file


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Ended:
    return undisturbed(NAME, tmp_path_factory.mktemp("calm"), arguments(weights))


def arguments(weights: Path) -> tuple[str, ...]:
    return ("--steps", "60", "--every-steps", "20", "--base", str(weights))


@pytest.mark.turns(3)
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, weights: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, arguments(weights), (15, 45))


@pytest.mark.turns(2)
def test_frozen_weights_are_those_of_their_file(tmp_path: Path, weights: Path) -> None:
    through = [PROGRAMS / "finetune_base.py"]
    ended = undisturbed(NAME, tmp_path, (str(weights), "20"), 2, through)
    ranks = [(int(same), int(tensors)) for same, tensors in re.findall(r"untouched (\d+) of (\d+)", ended.output)]
    assert len(ranks) == 2, ended.output
    same, tensors = min(ranks)
    record(NAME, "frozen tensors that are those of their file after 20 steps", same, f"of {tensors}")
    assert same == tensors
    assert any(bool(value.ne(0).any()) for name, value in ended.state["model"].items() if name.endswith("1.weight"))


def test_a_commit_holds_the_adapters_alone(tmp_path: Path, weights: Path, calm: Ended) -> None:
    whole = script("gpt").Transformer()
    optimizer = torch.optim.AdamW(whole.parameters())
    whole(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    with everstep.Checkpointer(str(tmp_path / "whole")) as checkpointer:
        checkpointer.restore({"model": whole, "optimizer": optimizer})
        checkpointer.save(1, {"model": whole, "optimizer": optimizer})
    small, large = (newest(folder) for folder in (calm.folder / "commits", tmp_path / "whole"))
    record(NAME, "bytes of a commit, by those of one of the whole model", small / large, "")
    assert small <= 0.05 * large


def newest(folder: Path) -> int:
    """Bytes of the newest commit."""
    size: int = everstep.Checkpointer(str(folder)).list()[0].bytes
    return size
