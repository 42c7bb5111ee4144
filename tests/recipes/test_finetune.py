"""examples/finetune: frozen weights stay those of their file, commits hold adapters, and a kill leaves no trace."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import everstep
from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, RecipeFailed, script, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns, shared_folder

pytestmark = pytest.mark.timeout(300)
NAME = "finetune"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of examples/gpt, as they begin. All processes of xdist write the same, in one place."""
    torch.manual_seed(1)
    file = shared_folder(tmp_path_factory) / "weights" / "model.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_suffix(f".{os.getpid()}")
    save_file(script("gpt").Transformer().state_dict(), written)
    return written.replace(file)


@pytest.fixture(scope="module")
def calm(shared: SharedRuns, weights: Path) -> Ended:
    return shared(NAME, arguments(weights))


def arguments(weights: Path) -> tuple[str, ...]:
    return ("--steps", "60", "--every-steps", "20", "--base", str(weights))


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, weights: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, arguments(weights), (15, 45))


@pytest.mark.long
def test_frozen_weights_are_those_of_their_file(tmp_path: Path, weights: Path) -> None:
    through = [PROGRAMS / "finetune_base.py"]
    ended = undisturbed(NAME, tmp_path, (str(weights), "20"), 2, through)
    ranks = [(int(same), int(tensors)) for same, tensors in re.findall(r"untouched (\d+) of (\d+)", ended.output)]
    assert len(ranks) == 2, ended.output
    same, tensors = min(ranks)
    record(NAME, "frozen tensors that are those of their file after 20 steps", same, f"of {tensors}")
    assert same == tensors
    assert trained(ended), "the adapters have learned nothing"


@pytest.mark.long
def test_other_frozen_weights_than_those_of_the_run_are_refused(tmp_path: Path, weights: Path, calm: Ended) -> None:
    other = load_file(weights)
    other["places.weight"][0, 0] += 1
    save_file(other, tmp_path / "other.safetensors")
    shutil.copytree(calm.folder / "commits", tmp_path / "commits")
    with pytest.raises(
        RecipeFailed, match=r"other.safetensors has the SHA-256 \w+, but .* begin a new run with another"
    ):
        undisturbed(NAME, tmp_path, ("--steps", "61", "--base", "other.safetensors"), 1)


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


def trained(ended: Ended) -> bool:
    """Whether the second matrix of an adapter, which begins as zeros, has other values."""
    second = [value for name, value in ended.state["model"].items() if re.match(r"adapters\.\d+\.1\.", name)]
    assert len(second) == 8, list(ended.state["model"])
    return any(bool(value.ne(0).any()) for value in second)


def newest(folder: Path) -> int:
    """Bytes of the newest commit."""
    size: int = everstep.Checkpointer(str(folder)).list()[0].bytes
    return size
