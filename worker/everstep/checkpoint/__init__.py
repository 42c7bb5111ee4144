"""The checkpoint engine: a commit log that cannot fork, shards that cannot tear, and a state that comes back whole.

Reaches bytes only through `everstep.storage`. The names below are loaded on first use, so that the pure modules (log,
manifest, layout, retention) can be used without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.checkpoint.checkpointer import Checkpointer
    from everstep.checkpoint.convert.incoming import import_checkpoint
    from everstep.checkpoint.errors import (
        CheckpointError,
        Damaged,
        Fenced,
        FormatError,
        NoCommit,
        Occupied,
        OwnerUnknown,
        SaveFailed,
        StateMismatch,
        UnsupportedVersion,
    )
    from everstep.checkpoint.handle import SaveHandle
    from everstep.checkpoint.keep import Keep
    from everstep.checkpoint.load.selection import LoadReport
    from everstep.checkpoint.retention.catalog import Catalog, Found
    from everstep.checkpoint.state.rng import RngState
    from everstep.checkpoint.state.union import Union

__all__ = [
    "Catalog",
    "CheckpointError",
    "Checkpointer",
    "Damaged",
    "Fenced",
    "FormatError",
    "Found",
    "Keep",
    "LoadReport",
    "NoCommit",
    "Occupied",
    "OwnerUnknown",
    "RngState",
    "SaveFailed",
    "SaveHandle",
    "SettingUnusable",
    "StateMismatch",
    "Union",
    "UnsupportedVersion",
    "import_checkpoint",
]

_HOME = {
    "Catalog": "retention.catalog",
    "Checkpointer": "checkpointer",
    "Found": "retention.catalog",
    "Keep": "keep",
    "LoadReport": "load.selection",
    "RngState": "state.rng",
    "SaveHandle": "handle",
    "Union": "state.union",
    "import_checkpoint": "convert.incoming",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
