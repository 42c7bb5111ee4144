"""Lightning: its fit loop, what the trainer keeps beside it, and how it adds up over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from everstep.torch_private.patches import Replacements, replace

# Values of `ModelCheckpoint` about its newest save that are not in its `state_dict`. By them each rank decides whether
# to save now, and a save is collective.
_NEWEST_SAVE = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def not_restarting(*loops: Any) -> None:
    """Let these loops go on as if they had not been loaded; the loops in them stay as they are."""
    for loop in loops:
        loop._restarting = False


def restore_modes(loop: Any, module: Any) -> None:
    """Put the module back into the modes in which a validation of the fit loop `loop` has found it."""
    loop.epoch_loop.val_loop._module_mode.restore(module)


def forget_hook(module: Any) -> None:
    """Let no hook count as running: a lost peer has ended it."""
    module._current_fx_name = None


def reset_results(trainer: Any) -> None:
    """Forget the values that the script has logged in the present epoch."""
    trainer._logger_connector.reset_results()
    trainer._logger_connector.reset_metrics()


def logged_metrics(trainer: Any) -> dict[str, Any]:
    """What `trainer.callback_metrics` last gave. To read that attribute itself may be a collective."""
    metrics: dict[str, Any] = trainer._logger_connector._callback_metrics
    return metrics


def forget_loaders(loop: Any) -> None:
    """Forget the loaders of the fit loop `loop`, which are made for another world, and what fetches from them."""
    with contextlib.suppress(AttributeError):  # there may be no fetcher
        loop._data_fetcher.teardown()
    loop._data_fetcher = loop._combined_loader = None
    loop.epoch_loop.val_loop._combined_loader = None


def fetcher_of(loop: Any) -> Any:
    """What fetches the fit loop's batches."""
    return loop._data_fetcher


def loaders_of(loop: Any) -> list[Any]:
    """The loaders that the fit loop trains on."""
    loaders: list[Any] = loop._combined_loader.flattened
    return loaders


def data_given_to(loop: Any) -> Any:
    """What `fit` was given to train on: a loader, several, or a module."""
    return loop._data_source.instance


def ignore_sigterm(replaced: Replacements, loop: Any) -> None:
    """Leave out, until `replaced.end()`, the collective by which the fit loop tells all ranks of a SIGTERM. It takes
    no notice of lost peers."""
    replaced.put("_broadcast_sigterm_tensor", lambda _: lambda: None, loop.epoch_loop)


def replace_stage(replaced: Replacements, run: Callable[[], Any], trainer: Any) -> None:
    """Run, until `replaced.end()`, `run` in place of the check of the validation and the fit loop."""
    replaced.put("_run_stage", lambda _: run, trainer)


def detects_anomalies(trainer: Any) -> bool:
    """Whether `Trainer(detect_anomaly=True)` was asked for."""
    return bool(trainer._detect_anomaly)


def run_closure(plugin: Any, model: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
    """Forward and backward of a step, with the hooks around them, and what they give."""
    return plugin._wrap_closure(model, optimizer, closure)


def replace_sync(make: Callable[[Any], Any]) -> None:
    """Replace the function by which tensors are reduced over the ranks, by `make` of it."""
    from lightning.fabric.utilities import distributed  # noqa: PLC0415  an adapter's library

    replace("_sync_ddp", make, distributed)


def set_rank(rank: int) -> None:
    """Tell Lightning's `rank_zero_only` the rank by which it decides. Its attribute has no underscore; only Lightning
    itself sets it."""
    from lightning.pytorch.utilities import rank_zero_only  # noqa: PLC0415  an adapter's library

    rank_zero_only.rank = rank


def newest_save(callback: Any) -> dict[str, Any]:
    """What a `ModelCheckpoint` knows about its newest save; empty for other callbacks."""
    return {name: getattr(callback, name) for name in _NEWEST_SAVE if hasattr(callback, name)}


def set_newest_save(callback: Any, values: Mapping[str, Any]) -> None:
    """Give a `ModelCheckpoint` what another one knew. Other names are left out."""
    for name, value in values.items():
        if name in _NEWEST_SAVE:
            setattr(callback, name, value)
