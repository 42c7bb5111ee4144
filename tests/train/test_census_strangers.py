"""Scripts as strangers write them: accepted if they track all. If they leave one thing out, it is refused by its name,
or named at the start and found by the comparison once the run is started again."""

from __future__ import annotations

import logging
import re
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.recovery.errors import LoopError
from everstep.train.guards.comparison.restart_check import NEXT

SCRIPTS = Path(__file__).with_name("strangers")
SAVED = 3
WAIT_SECONDS = 60.0


class Crash(Exception):
    """Ends a run as a power cut would: nothing of it is saved any more."""


def play(script: str, folder: Path, without: str = "", case: str = "", *, every: int = 100, crash: int = 0) -> None:
    """Run it here, without tracking the objects called `without` (several: "a b"). `crash`: the step behind which it
    dies, once what is noted of the step behind a commit is stored."""
    torch.manual_seed(0)  # the same data and the same model at each start

    def track(run: Any, **objects: Any) -> None:
        run.track(**{name: value for name, value in objects.items() if name not in without.split()})
        if crash:
            run.evaluate(lambda: die(folder) if run.step == crash else None, every=1)

    names = {"URL": str(folder / "commits"), "CASE": case, "EVERY": every, "track": track}
    runpy.run_path(str(SCRIPTS / f"{script}.py"), init_globals=names, run_name="__main__")


def die(folder: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not list((folder / "commits").glob(f"data/*/{NEXT}.bin")):
        assert time.monotonic() < deadline, "the step behind the commit is not noted"
        time.sleep(0.01)
    raise Crash


@pytest.mark.long_but("stages--attack")
@pytest.mark.parametrize(
    ("script", "without", "case"),
    [
        ("mnist", "", ""),
        ("ddp_tutorial", "", ""),
        ("ddp_tutorial", "ddp", ""),
        ("ddp_tutorial", "model", ""),
        ("mingpt", "", ""),
        ("nanogpt", "", ""),
        ("nanogpt", "", "scaler"),
        ("timm_style", "", ""),
        ("dcgan", "", ""),
        ("byol", "", ""),
        ("moco", "", ""),
        ("swa", "", ""),
        ("lookahead", "", ""),
        ("lookahead", "", "plain"),
        ("ppo", "", ""),
        ("ppo", "", "carried and said"),
        ("lora", "", ""),
        ("word_language_model", "", ""),
        ("dino", "", ""),
        ("by_hand", "", ""),
        ("stages", "", "frozen"),
        ("stages", "", "second tracked"),
        ("stages", "", "attack"),
        ("stages", "", "probe and said"),
        # What is not trained need not be tracked.
        ("stages", "backbone", "frozen"),
    ],
)
def test_script_that_tracks_all_that_it_moves_is_accepted(
    script: str, without: str, case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play(script, tmp_path, without, case)


@pytest.mark.long_but("swa-swa_scheduler--swa_scheduler is a learning-rate scheduler (SWALR)")
@pytest.mark.parametrize(
    ("script", "without", "case", "words"),
    [
        ("mnist", "optimizer", "", "optimizer is an optimizer (Adadelta) that steps"),
        ("mnist", "model", "", "run.track(model=model)"),
        ("mnist", "scheduler", "", "scheduler is a learning-rate scheduler (StepLR)"),
        ("mnist", "model optimizer scheduler", "", "optimizer is an optimizer (Adadelta)"),
        ("ddp_tutorial", "model ddp", "", "trained by the tracked optimizer"),
        ("ddp_tutorial", "model ddp optimizer", "", "is a module in DistributedDataParallel"),
        ("ddp_tutorial", "optimizer", "", "optimizer is an optimizer (SGD)"),
        ("mingpt", "model", "", "run.track(model=model)"),
        ("mingpt", "optimizer", "", "self.optimizer is an optimizer (AdamW)"),
        ("nanogpt", "scaler", "scaler", "scaler is a gradient scaler"),
        ("timm_style", "model_ema", "", "run.track(model_ema=model_ema)"),
        ("timm_style", "lr_scheduler", "", "is a learning-rate scheduler"),
        ("dcgan", "netG", "", "run.track(netG=netG)"),
        ("dcgan", "optimizerG", "", "optimizerG is an optimizer (Adam)"),
        ("dcgan", "", "generator", "noise_rng is a random generator"),
        ("byol", "target", "", "run.track(target_encoder=learner.target_encoder)"),
        ("byol", "predictor", "", "learner.online_predictor"),
        ("swa", "swa_model", "", "swa_model is an average of weights"),
        ("swa", "swa_scheduler", "", "swa_scheduler is a learning-rate scheduler (SWALR)"),
        ("lookahead", "optimizer", "", "base is an optimizer (Adam)"),
        ("lora", "adapters", "", "run.track("),
        ("lora", "", "frozen moves", "model"),
        ("word_language_model", "model", "", "run.track(model=model)"),
        ("dino", "teacher", "", "run.track(teacher=teacher)"),
        ("by_hand", "w1", "", "run.track(w1=w1)"),
        ("stages", "", "second", "second is an optimizer (Adam)"),
        ("stages", "backbone", "group", "run.track(backbone=backbone)"),
        ("stages", "", "group", "optimizer.add_param_group was called in the loop"),
        ("stages", "", "probe", "probe_optimizer is an optimizer (SGD)"),
    ],
)
def test_script_that_leaves_one_thing_out_is_refused_by_its_name(
    script: str, without: str, case: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(LoopError) as refused:
        play(script, tmp_path, without, case)
    assert words in str(refused.value)
    assert "run.untracked(" in str(refused.value)


REFUSED, WARNED = True, False


@pytest.mark.usefixtures("patient_store")
@pytest.mark.long_but("word_language_model--carried-hidden-hidden[0]-True")
@pytest.mark.parametrize(
    ("script", "without", "case", "name", "differs", "refused"),
    [
        ("nanogpt", "", "prefetch", "X", "X", REFUSED),
        ("moco", "", "plain queue", "model.queue", "model.queue", REFUSED),
        ("moco", "", "not persistent", "model.queue", "model.queue", REFUSED),
        ("lookahead", "", "plain base", "optimizer.slow", "optimizer.slow[0][0]", WARNED),
        ("ppo", "", "carried", "next_obs", "next_obs", REFUSED),
        ("word_language_model", "", "carried", "hidden", "hidden[0]", REFUSED),
        ("dino", "dino_loss", "", "dino_loss.center", "dino_loss.center", REFUSED),
        # Of parameters without a module or an optimizer no gradients are compared.
        ("by_hand", "ema", "", "ema", "ema[0]", WARNED),
        ("by_hand", "memory_bank", "", "memory_bank", "memory_bank", WARNED),
        ("by_hand", "running_mean", "", "running_mean", "running_mean", WARNED),
        ("by_hand", "velocity", "", "velocity", "velocity", WARNED),
    ],
)
def test_tensor_that_is_left_out_is_named_at_the_start_and_again_after_a_restart(
    script: str, without: str, case: str, name: str, differs: str, refused: bool,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.WARNING, "everstep.train"):
        with pytest.raises(Crash):
            play(script, tmp_path, without, case, every=SAVED, crash=SAVED + 1)
        assert re.search(rf"carried by the loop and not tracked: .*{re.escape(name)} \(", caplog.text)
        caplog.clear()
        if refused:
            with pytest.raises(LoopError, match=rf"computes other gradients.*{re.escape(differs)} \("):
                play(script, tmp_path, without, case, every=SAVED)
        else:
            play(script, tmp_path, without, case, every=SAVED)
            assert re.search(rf"variables these differ: .*{re.escape(differs)} \(", caplog.text)


@pytest.mark.long_but("swa-swa_model swa_scheduler-told2")
@pytest.mark.parametrize(
    ("script", "without", "told"),
    [
        ("dcgan", "optimizerG optimizerD", ("optimizerD=optimizerD", "optimizerG=optimizerG")),
        ("mnist", "model optimizer", ("optimizer=optimizer", "model=model")),
        ("swa", "swa_model swa_scheduler", ("swa_model=swa_model", "swa_scheduler=swa_scheduler")),
    ],
)
def test_script_that_leaves_out_several_things_is_told_of_all_at_once(
    script: str, without: str, told: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(LoopError) as refused:
        play(script, tmp_path, without, "")
    for one in told:
        assert f"run.track({one})" in str(refused.value)


@pytest.mark.long
def test_metric_that_reaches_no_parameter_is_named_once_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "everstep.train"):
        play("timm_style", tmp_path)
    said = [r.getMessage() for r in caplog.records if "not tracked" in r.getMessage()]
    assert len(said) == 1
    assert "confusion.confmat" in said[0]
    assert "teacher" not in said[0]
