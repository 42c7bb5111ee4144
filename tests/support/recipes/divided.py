"""What a divided model computes is held against its model in one piece: logits, and then gradients.

The files are those of tests/recipes/programs/divided.py. Invariant: four ranks, in replicas of `ranks` ranks with
successive numbers; each replica has as many rows of the batch as any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from support.recipes.recipes import Ended, script

WORLD = 4


def read(ended: Ended, rank: int) -> dict[str, Any]:
    """`given`, `logits`, `target`, `parameters`, `gradients` and `tokens` of a rank's newest step."""
    found: dict[str, Any] = torch.load(ended.folder / f"logits-{rank}.pt")
    more = {name: torch.load(ended.folder / f"{name}-{rank}.pt") for name in ("target", "gradients")}
    return found | more


def furthest(name: str, ended: Ended, ranks: int, by_tokens: bool = False) -> tuple[float, float]:
    """The largest difference of a logit, and of a gradient by the largest gradient, on any rank. `by_tokens`: each rank
    of a replica was given its part of the texts."""
    model = script(name).Network()
    found = [read(ended, rank) for rank in range(WORLD)]
    model.load_state_dict(found[0]["parameters"])
    logits = 0.0
    for first in range(0, WORLD, ranks):
        replica = found[first : first + ranks]
        given, target = replica[0]["given"], replica[0]["target"]
        divided = [one["logits"] for one in replica]
        if by_tokens:
            given = torch.cat([one["given"] for one in replica], 1)
            target = torch.cat([one["target"].view(one["given"].shape) for one in replica], 1)
            divided = [torch.cat(divided, 1)]
        whole = model(given)
        for one in divided:
            torch.testing.assert_close(one, whole.detach(), rtol=1e-4, atol=1e-5)
            logits = max(logits, float((one - whole.detach()).abs().max()))
        # The mean over the whole batch, of which each replica has as many rows.
        torch.autograd.backward(cross_entropy(whole.flatten(0, -2), target.flatten()) * ranks / WORLD)
    return logits, check_gradients(
        {n: p.grad for n, p in model.named_parameters()}, [one["gradients"] for one in found]
    )


def check_gradients(whole: dict[str, Any], found: list[dict[str, torch.Tensor]]) -> float:
    """The largest difference of a gradient on any rank, by the largest gradient of the model in one piece. A rank may
    have those of some parameters only."""
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    apart = 0.0
    for gradients in found:
        assert gradients
        for name, gradient in gradients.items():
            apart = max(apart, float((gradient - whole[name]).abs().max()))
    assert apart < 1e-4 * largest, (apart, largest)
    return apart / largest
