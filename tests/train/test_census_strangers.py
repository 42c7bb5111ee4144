"""Scripts as strangers write them: accepted if they track all, refused by name if they leave one thing out."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path
from typing import Any

import pytest

from everstep.recovery.errors import LoopError

SCRIPTS = Path(__file__).with_name("strangers")


def play(script: str, folder: Path, without: str = "", case: str = "") -> None:
    """Run it here, without tracking the objects called `without` (several: "a b")."""

    def track(run: Any, **objects: Any) -> None:
        run.track(**{name: value for name, value in objects.items() if name not in without.split()})

    names = {"URL": str(folder / "commits"), "CASE": case, "track": track}
    runpy.run_path(str(SCRIPTS / f"{script}.py"), init_globals=names, run_name="__main__")


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
        ("nanogpt", "", "prefetch", "X is carried from one step to the next"),
        ("timm_style", "model_ema", "", "run.track(model_ema=model_ema)"),
        ("timm_style", "lr_scheduler", "", "is a learning-rate scheduler"),
        ("dcgan", "netG", "", "run.track(netG=netG)"),
        ("dcgan", "optimizerG", "", "optimizerG is an optimizer (Adam)"),
        ("dcgan", "", "generator", "noise_rng is a random generator"),
        ("byol", "target", "", "run.track(target_encoder=learner.target_encoder)"),
        ("byol", "predictor", "", "learner.online_predictor"),
        ("moco", "", "plain queue", "self.register_buffer('queue'"),
        ("moco", "", "not persistent", "model changes from step to step (model.queue)"),
        ("swa", "swa_model", "", "swa_model is an average of weights"),
        ("swa", "swa_scheduler", "", "swa_scheduler is a learning-rate scheduler (SWALR)"),
        ("lookahead", "", "plain base", "optimizer.slow holds copies of the parameters"),
        ("lookahead", "optimizer", "", "base is an optimizer (Adam)"),
        ("ppo", "", "carried", "next_obs is carried from one step to the next"),
        ("lora", "adapters", "", "run.track("),
        ("lora", "", "frozen moves", "model"),
        ("word_language_model", "model", "", "run.track(model=model)"),
        ("word_language_model", "", "carried", "hidden[0] is carried"),
        ("dino", "dino_loss", "", "dino_loss"),
        ("dino", "teacher", "", "run.track(teacher=teacher)"),
        ("by_hand", "w1", "", "run.track(w1=w1)"),
        ("by_hand", "ema", "", "ema holds copies of the parameters"),
        ("by_hand", "memory_bank", "", "run.track(memory_bank=memory_bank)"),
        ("by_hand", "running_mean", "", "run.track(running_mean=running_mean)"),
        ("by_hand", "velocity", "", "velocity"),
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
    said = [r.getMessage() for r in caplog.records if "nothing that is tracked holds" in r.getMessage()]
    assert len(said) == 1
    assert "confusion" in said[0]
    assert "teacher" not in said[0]
