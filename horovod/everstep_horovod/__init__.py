"""Horovod's interface for PyTorch over torch.distributed, with Everstep's recovery.

    import everstep_horovod.torch as hvd

A script that imports `horovod.torch` runs unchanged by `everstep-run -m everstep_horovod train.py`: `install`
gives this package that name. Elastic scripts recover in process, from the last `state.commit()`; others are started
again (docs/adr/0031). A name of Horovod that is not here is refused by name. Reference: docs/reference/horovod.md.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from everstep.recovery.errors import LoopError

# Horovod's modules, and those of ours that have their names.
_MODULES = {
    "horovod": "everstep_horovod",
    "horovod.torch": "everstep_horovod.torch",
    "horovod.torch.elastic": "everstep_horovod.torch.elastic",
    "horovod.torch.elastic.sampler": "everstep_horovod.sampler",
    "horovod.torch.elastic.state": "everstep_horovod.state",
    "horovod.torch.compression": "everstep_horovod.compression",
    "horovod.torch.functions": "everstep_horovod.broadcasts",
    "horovod.torch.mpi_ops": "everstep_horovod.torch",
    "horovod.torch.optimizer": "everstep_horovod.optimizer",
    "horovod.common.exceptions": "everstep_horovod.errors",
}

_IMPORTABLE = str(Path(__file__).parent / "importable")


class _Refusing(MetaPathFinder):
    """Finds no module: it says which of Horovod's modules are here."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] != "horovod":
            return None
        raise ModuleNotFoundError(
            f"{name}: Everstep has Horovod's interface for PyTorch alone: {', '.join(_MODULES)}", name=name
        )


def install() -> None:
    """Give this package the name `horovod`, in this process and those that multiprocessing starts in it. Call it before
    the script imports Horovod."""
    for theirs, ours in _MODULES.items():
        sys.modules[theirs] = importlib.import_module(ours)
    sys.modules["horovod.common"] = common = ModuleType("horovod.common")
    common.exceptions = sys.modules["horovod.common.exceptions"]  # type: ignore[attr-defined]
    if _IMPORTABLE not in sys.path:
        sys.path.insert(1, _IMPORTABLE)
    if not any(isinstance(finder, _Refusing) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Refusing())


def run(*_: Any, **__: Any) -> NoReturn:
    """Refused: a script is started by a launcher, which can start it again."""
    raise LoopError(
        "horovod.run(): the processes are started by Everstep. Call the function itself, and start the script with "
        "`everstep-run --nproc-per-node N -m everstep_horovod train.py`, or in a TrainingJob"
    )
