"""Everstep's worker library: `start` a run that survives its peers, or use `Checkpointer` and the loaders alone.

Importing it costs milliseconds and no torch: each name is loaded on first use, because launchers, DataLoader workers
and the operator import this package too.
"""

from __future__ import annotations

from importlib import import_module

from everstep.version import __version__ as __version__

TYPE_CHECKING = False  # type checkers know the name; importing typing for it would be most of the cost of this import
if TYPE_CHECKING:
    from typing import Any

    from everstep.checkpoint.checkpointer import Checkpointer
    from everstep.checkpoint.errors import Fenced
    from everstep.checkpoint.load.readonly import load, open_commit
    from everstep.checkpoint.state.rng import RngState
    from everstep.checkpoint.state.union import Union
    from everstep.data.loader import ElasticLoader
    from everstep.data.sampler import ElasticSampler
    from everstep.recovery.errors import LoopError
    from everstep.reporting.report import report
    from everstep.reporting.stop_signal import Preempted
    from everstep.storage.errors import StoreUnusable
    from everstep.train.session import Run, current, start

__all__ = [
    "Checkpointer",
    "ElasticLoader",
    "ElasticSampler",
    "Fenced",
    "LoopError",
    "Preempted",
    "RngState",
    "Run",
    "StoreUnusable",
    "Union",
    "current",
    "load",
    "open_commit",
    "report",
    "start",
]

_HOME = {
    "Checkpointer": "checkpoint.checkpointer",
    "ElasticLoader": "data.loader",
    "ElasticSampler": "data.sampler",
    "Fenced": "checkpoint.errors",
    "LoopError": "recovery.errors",
    "Preempted": "reporting.stop_signal",
    "RngState": "checkpoint.state.rng",
    "Run": "train.session",
    "StoreUnusable": "storage.errors",
    "Union": "checkpoint.state.union",
    "current": "train.session",
    "load": "checkpoint.load.readonly",
    "open_commit": "checkpoint.load.readonly",
    "report": "reporting.report",
    "start": "train.session",
}

_OF_TRAINING = ("torch", "numpy", "safetensors")  # what the extra `worker` brings


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as e:
        if e.name not in _OF_TRAINING:
            raise
        hint = f"{__name__}.{name} needs {e.name}, which is not installed: pip install 'everstep[worker]'"
        raise ModuleNotFoundError(hint, name=e.name) from None  # what imports what is no news


def __dir__() -> list[str]:
    return list(__all__)
