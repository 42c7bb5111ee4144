"""The examples of docs/reference/checkpoint.md run as they are written; only the bucket is a folder here."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import everstep

TEXT = (Path(__file__).resolve().parents[2] / "docs/reference/checkpoint.md").read_text()


def examples(section: str) -> list[str]:
    """The code of a section."""
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    assert found, section
    return found


class Network(nn.Module):
    def __init__(self, head: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, head)


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """The examples have these at hand: a run with steps 1 to 3, and models for it."""
    torch.manual_seed(1)
    model, ema = Network(3), Network(3)
    checkpointer = everstep.Checkpointer(str(tmp_path / "run"), on_event=lambda kind, **_: None)
    checkpointer.restore({})
    for step in (1, 2, 3):
        checkpointer.save(step, {"model": model, "ema": ema, "step": step}).wait(30)
    checkpointer.wait(30)
    found = {"model": model, "ema": ema, "finetuned": Network(5), "checkpointer": checkpointer, "torch": torch}
    return {**found, "everstep": everstep, "root": str(tmp_path / "run")}


def run(code: str, names: dict[str, Any]) -> None:
    exec(code.replace("s3://bucket/run", names["root"]), names)


def test_part_is_taken(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    partly, chosen = examples("Taking a part")
    run(partly, names)
    assert torch.equal(names["finetuned"].body.weight, names["model"].body.weight)
    assert "model/head.weight: shape (3, 4) in the commit, (5, 4) in the state passed" in capsys.readouterr().out
    run(chosen, names)
    assert torch.equal(names["finetuned"].body.weight, names["ema"].body.weight)


def test_run_goes_back(names: dict[str, Any]) -> None:
    (code,) = examples("Going back")
    run(code, names)
    assert names["state"]["step"] == 1
    assert [f.step for f in names["checkpointer"].list()][:3] == [2, 3, 2]
    names["checkpointer"].close()


def test_commit_is_read_without_taking_it(names: dict[str, Any]) -> None:
    (code, *_) = examples("Reading without taking")
    run(code, names)
    assert names["loaded"].step == 3
    assert torch.equal(names["weights"]["body.weight"], names["model"].body.weight)


def test_rules_of_what_is_kept_are_taken(names: dict[str, Any], tmp_path: Path) -> None:
    (code,) = examples("What is kept")
    run(code, {**names, "root": str(tmp_path / "other")})


def test_folder_of_hugging_face_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = examples("In")
    (tmp_path / "llama").mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "llama" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    run(code, {"root": str(tmp_path / "run")})
    assert everstep.load(tmp_path / "run").state["model"]["weight"].tolist() == [1.0, 1.0]


def test_slice_is_read(names: dict[str, Any]) -> None:
    (code,) = examples("One tensor, or a slice of it")
    run(code, names)
    assert torch.equal(names["rows"], names["model"].body.weight[1:3])


def test_public_names_of_the_checkpointer_are_those_of_the_page(tmp_path: Path) -> None:
    calls = TEXT.split("\n## Calls\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in calls.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)\(", row)} | set(re.findall(r"`(report)`", calls))
    made = everstep.Checkpointer(str(tmp_path))
    assert {name for name in dir(made) if not name.startswith("_")} == documented
