"""What the data tests share: no job around them."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be a rank of some job itself."""
    for name in [n for n in os.environ if n.startswith("EVERSTEP_") or n in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the tests run on both cores already, and one thread sums in one order
