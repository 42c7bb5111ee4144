"""Trainer of Hugging Face: the parts of its loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from everstep.torch_private.patches import Replacements


def replace_preparation(replaced: Replacements, make: Callable[[Any], Any], trainer: Any) -> None:
    """Replace, until `replaced.end()`, the method that makes the optimizer and wraps the model."""
    replaced.put("_prepare_for_training", make, trainer)


def replace_work(replaced: Replacements, make: Callable[[Any], Any], trainer: Any) -> None:
    """Replace, until `replaced.end()`, the method that logs, evaluates and saves after a step."""
    replaced.put("_maybe_log_save_evaluate", make, trainer)


def do_work(trainer: Any) -> None:
    """Log, evaluate and save, as after a step."""
    trainer._maybe_log_save_evaluate(
        trainer._tr_loss, None, trainer.model_wrapped, None, trainer.state.epoch, None, None
    )


def makes_schedule(trainer: Any) -> bool:
    """Whether Trainer has made the schedule itself, and not the script."""
    return bool(trainer._created_lr_scheduler)


def keep_schedule(trainer: Any) -> None:
    """Let Trainer take the schedule for the script's: it would make its own one anew in each `train`."""
    trainer._created_lr_scheduler = False


def finalize(trainer: Any) -> Any:
    """End a training in which no step is left; what `train` returns then."""
    return trainer._finalize_training(None, 0, time.time())


def forget_evaluation_loaders(trainer: Any) -> None:
    """Forget the loaders that Trainer keeps for its evaluations: they are cut for another world."""
    trainer.__dict__.pop("_eval_dataloaders", None)


@contextmanager
def loading_weights_by(load: Callable[..., None], trainer: Any) -> Iterator[None]:
    """A context in which Trainer calls `load(folder, model=None)` for the weights of the folder it resumes from."""
    replaced = Replacements()
    replaced.put("_load_from_checkpoint", lambda _: load, trainer)
    try:
        yield
    finally:
        replaced.end()
