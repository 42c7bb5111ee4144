"""`everstep ckpt import|export|diff|cat` through their entry point, as a person and as a script meet them."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import everstep
from support.processes.terminal import on_terminal
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(180)


def ckpt(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return warm().run("-m", "everstep.cli.main", "ckpt", *arguments, timeout=90, env=dict(os.environ))


def done(*arguments: str | Path) -> str:
    result = ckpt(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def state(step: int) -> dict[str, Any]:
    weights = {"weight": torch.arange(6.0).view(2, 3) + step, "bias": torch.zeros(2)}
    return {"model": weights, "epoch": step, "lr": {"now": [0.5, float("nan")]}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    with everstep.Checkpointer(url, on_event=lambda kind, **_: None) as checkpointer:
        checkpointer.restore(state(0))
        for step in (1, 2):
            checkpointer.save(step, state(step)).wait(30)
    return url


@pytest.mark.long
def test_exports_come_back_as_commits_that_do_not_differ(url: str, tmp_path: Path) -> None:
    for form, name in (("torch", "all.pt"), ("dcp", "folder")):
        told = done("export", url, tmp_path / name, "--format", form, "--step", "1")
        assert told.startswith("step 1: ")
        told = done("import", tmp_path / name, tmp_path / f"{name}-run", "--step", "9")
        assert told == f"step 9: 2 tensors to file://{tmp_path}/{name}-run: epoch, lr, model\n"
        assert done("verify", tmp_path / f"{name}-run").startswith("step 9  record 1  whole")
        assert done("diff", url, tmp_path / f"{name}-run", "--step", "1") == "the same: step 1 and step 9\n"
        assert done("diff", url, tmp_path / name, "--step", "1").startswith("the same: step 1 and ")
    done("export", url, tmp_path / "hub", "--format", "huggingface", "--key", "model")
    done("import", tmp_path / "hub", tmp_path / "hub-run")
    assert json.loads(done("show", tmp_path / "hub-run", "--json"))["step"] == 0


@pytest.mark.parametrize(
    ("command", "what", "least"),
    [
        (("export", "{url}", "{tmp}/out"), "export", 32),
        (("import", "{tmp}/file.safetensors", "{tmp}/run"), "import", 24),
        (("diff", "{url}", "--step", "1", "--to-step", "1"), "diff", 64),
    ],
    ids=["export", "import", "diff"],
)
@pytest.mark.long_but("diff")
def test_bar_at_a_terminal_grows_by_all_that_is_read(
    url: str, tmp_path: Path, command: tuple[str, ...], what: str, least: int
) -> None:
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / "file.safetensors")
    arguments = [part.format(url=url, tmp=tmp_path) for part in command]
    shown = on_terminal("-m", "everstep.cli.main", "ckpt", *arguments)
    whole = re.search(rf"{what} .*\D(\d+)/\1 bytes", shown)
    assert whole is not None, shown
    assert int(whole[1]) >= least


def test_diff_names_what_differs_and_its_exit_code_says_so(url: str, tmp_path: Path) -> None:
    result = ckpt("diff", url, "--step", "1", "--to-step", "2")
    assert result.returncode == 1
    assert [line.split(maxsplit=2) for line in result.stdout.splitlines()] == [
        ["value", "epoch", "1 → 2"],
        ["values", "model/weight", "6 of 6 elements differ, by 1 at most"],
    ]
    save_file({"weight": torch.zeros(3, 2), "more": torch.zeros(1)}, tmp_path / "file.safetensors")
    found = json.loads(ckpt("diff", url, tmp_path / "file.safetensors", "--json").stdout)
    assert {d["name"]: d["kind"] for d in found} == {
        "epoch": "missing", "lr/now/0": "missing", "lr/now/1": "missing", "model/bias": "missing",
        "model/weight": "shape", "model/more": "added",
    }  # fmt: skip


def test_diff_of_runs_that_are_seeded_otherwise_says_what_to_write(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        with everstep.Checkpointer(str(tmp_path / name), on_event=lambda kind, **_: None) as checkpointer:
            seeds = {"seeds": {"seeds": {"numpy": seed, "python": seed, "torch": 0}}}
            checkpointer.restore(seeds)
            checkpointer.save(1, seeds).wait(30)
    result = ckpt("diff", tmp_path / "a", tmp_path / "b")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == (
        "the runs seeded these generators otherwise: numpy, python. Write at the beginning of the script: "
        "`random.seed(0)`, `numpy.random.seed(0)`"
    )


def test_cat_prints_a_tensor_or_a_value_by_its_name(url: str) -> None:
    told = done("cat", url, "model/weight")
    assert told.startswith("float32 [2, 3]\n")
    assert "5." in told
    assert json.loads(done("cat", url, "model/weight", "--step", "1", "--json")) == {
        "dtype": "float32", "shape": [2, 3], "values": [[1, 2, 3], [4, 5, 6]],
    }  # fmt: skip
    assert done("cat", url, "epoch") == "2\n"
    assert done("cat", url, "lr/now/1", "--json") == '"nan"\n'


@pytest.mark.long_but("arguments3-1-file.bin: is no file that torch.save writes")
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["cat", "{url}", "model/wieght"], 2, "step 2 has no 'model/wieght'; it has model/bias, model/weight"),
        (["cat", "{url}", "lr"], 2, "it has lr/now/0, lr/now/1"),
        (["import", "{tmp}/nothing", "{tmp}/new"], 1, "nothing: there is no such file or folder"),
        (["import", "{tmp}/file.bin", "{tmp}/new"], 1, "file.bin: is no file that torch.save writes"),
        (["export", "{url}", "{tmp}/x", "--format", "zip"], 2, "--format zip: one of"),
        (["export", "{url}", "{tmp}/x", "--format", "torch", "--key", "nope"], 1, "has no key 'nope'"),
        (["diff", "{url}", "{tmp}/file.bin", "--to-step", "1"], 2, "holds no commits"),
        (["diff", "{url}", "--to-tag", "good"], 2, "no commit is tagged 'good'"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(
    arguments: list[str], code: int, text: str, url: str, tmp_path: Path
) -> None:
    (tmp_path / "file.bin").write_bytes(b"no zip")
    result = ckpt(*[a.format(url=url, tmp=tmp_path) for a in arguments])
    assert (result.returncode, text in result.stderr) == (code, True), result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "new" / "log").exists()
