"""What the tests of imports and exports share: a training state, and whether two are the same."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import everstep
from everstep.storage import MemoryStore


def made(seed: int) -> dict[str, Any]:
    """A model, its optimizer and scheduler after a step, and values of each kind."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 / seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "epoch": seed,
        "seen": {"samples": [seed, 2]},
    }


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def committed(state: dict[str, Any], step: int = 5) -> MemoryStore:
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as checkpointer:
        checkpointer.restore(state)
        checkpointer.save(step, state).wait(30)
    return store


def write(form: str, state: dict[str, Any], path: Path) -> Path:
    if form == "torch":
        torch.save(state, path)
    else:
        save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return path
