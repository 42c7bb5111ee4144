"""The random number generators of a process as one object that a checkpoint can hold, each rank's its own."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RngState:
    """Pass `"rng": everstep.RngState()` in the state: Python's, numpy's and torch's generators are saved and restored.

    Saved per rank, because ranks draw different numbers. After a resize, ranks that the commit did not have keep the
    generators that the script seeded.
    """

    everstep_per_rank = True

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy as np  # noqa: PLC0415  only when the saved process used it

            np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])
