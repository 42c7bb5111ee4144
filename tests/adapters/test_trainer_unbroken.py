"""Hugging Face Trainer under `everstep-run`: rank 1 of three is killed, the others keep their processes, and the run
ends as the undisturbed one, bit by bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_run import HERE, environment

pytestmark = pytest.mark.timeout(600)  # two runs, and the import of a framework, on a machine that does much else

SIZE = 3
STEPS = 12  # 96 samples, 24 a step, 3 epochs
SECONDS = 240
PRELOAD = "torch,torch.distributed,torch._dynamo,transformers.trainer,everstep.train.adapters.huggingface"


@dataclass(frozen=True, slots=True)
class Played:
    """`found`: what each rank has written at its end. `steps`: those that each process began, by pid."""

    code: int
    output: str
    found: list[dict[str, Any]]
    steps: dict[int, list[int]]


def play(folder: Path, kill: str = "", restarts: int = 1) -> Played:
    folder.mkdir()
    flags = [f"--nproc-per-node={SIZE}", "--standalone", f"--max-restarts={restarts}"]
    argv = [*flags, str(HERE / "run_trainer.py"), str(folder)]
    environ = {**environment(), "EVERSTEP_PRELOAD": PRELOAD, "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "everstep.agent.main", *argv, kill], stdout=log, stderr=log, env=environ,
            start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its processes die with it
            process.wait(10)
    found = [torch.load(p, weights_only=False) for p in sorted(folder.glob("*.pt"))]
    steps = {int(p.stem): [int(line.split()[0]) for line in p.open()] for p in folder.glob("*.steps")}
    return Played(code, (folder / "log").read_text(), found, steps)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    played = play(tmp_path_factory.mktemp("trainer") / "undisturbed")
    assert played.code == 0, played.output[-4000:]
    assert len(played.found) == SIZE
    return played


def flat(value: Any, name: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return {name: value}
    return {k: v for key, one in items for k, v in flat(one, f"{name}.{key}").items()}


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    one, other = (flat({k: v for k, v in found.items() if k != "pid"}) for found in (a, b))
    assert one.keys() == other.keys()
    return [k for k, v in one.items() if not (torch.equal(v, other[k]) if torch.is_tensor(v) else v == other[k])]


@pytest.mark.parametrize(
    "kill",
    [
        "6:forward2",  # when the first half of the step's gradient is accumulated
        "7:evaluating",  # in the evaluation at the end of the second epoch
        pytest.param("0:forward1", marks=pytest.mark.long),
        pytest.param("5:begin", marks=pytest.mark.long),
        pytest.param("5:end", marks=pytest.mark.long),  # the optimizer has stepped
        pytest.param("3:evaluated", marks=pytest.mark.long),  # others may not have heard of its result
        pytest.param("11:evaluating", marks=pytest.mark.long),  # behind the last step
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
    ended = {found["pid"] for found in played.found}
    began = {pid for pid, steps in played.steps.items() if steps[0] == 0}
    assert len(began & ended) == SIZE - 1 + (kill == "0:forward1"), "the others kept theirs"
    assert "the last commit" not in played.output


def test_trainer_that_is_begun_without_the_callback_is_refused_by_name(tmp_path: Path) -> None:
    played = play(tmp_path / "plain", "plain", restarts=0)
    assert played.code != 0
    assert "callback.train(trainer)" in played.output
    assert not played.steps
