"""A resize changes nothing about the training: gradients, losses and parameters against a single process (failure 88).

Ranks are simulated one after the other in this process, and averaged as DDP does. Tolerance: 1e-12 in float64 relative
to the largest gradient (sums are taken in another order), 1e-5 in float32.
"""

import json
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from everstep.data import ElasticLoader

FEATURES = 6


def dataset(n: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, FEATURES, generator=generator, dtype=dtype)
    return TensorDataset(x, x @ torch.linspace(-1, 1, FEATURES, dtype=dtype) + 0.1)


def model(dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, 1, dtype=dtype)


def averaged(
    network: torch.nn.Linear, loops: list[Any], loaders: list[ElasticLoader]
) -> tuple[torch.Tensor, list[int]]:
    """The gradient that DDP leaves on every rank after one step, and the step's samples in rank order."""
    total = torch.zeros(FEATURES + 1, dtype=network.weight.dtype)
    indices: list[int] = []
    for loader, loop in zip(loaders, loops, strict=True):
        network.zero_grad()
        while True:
            batch = next(loop)
            x, y = batch.data
            batch.scale(mse_loss(network(x).squeeze(1), y)).backward()
            indices += batch.indices[: batch.count].tolist()
            if batch.last:
                break
        loader.acknowledge()
        total += torch.cat([network.weight.grad.flatten(), network.bias.grad])  # type: ignore[list-item, union-attr]
    return total / len(loaders), indices


def single(network: torch.nn.Linear, data: TensorDataset, indices: list[int]) -> torch.Tensor:
    network.zero_grad()
    x, y = data[indices]
    mse_loss(network(x).squeeze(1), y).backward()
    return torch.cat([network.weight.grad.flatten(), network.bias.grad])  # type: ignore[list-item, union-attr]


def world(size: int, data: TensorDataset, state: str | None = None, **settings: Any) -> list[ElasticLoader]:
    loaders = [ElasticLoader(data, rank=r, world_size=size, seed=4, **settings) for r in range(size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(state))
    return loaders


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_88_gradient_equals_the_single_process_one_with_an_uneven_remainder(
    size: int, micro_batch: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    """54 samples in steps of 10: the last one has 4, fewer than the larger worlds have ranks."""
    data = dataset(54, dtype)
    loaders = world(size, data, global_batch=10, micro_batch=micro_batch)
    loops = [iter(loader) for loader in loaders]
    reference = [b.indices.tolist() for b in world(1, data, global_batch=10)[0]]
    network = model(dtype)
    assert len(reference) == 6
    for wanted in reference:
        gradient, indices = averaged(network, loops, loaders)
        assert indices == wanted
        alone = single(network, data, wanted)
        assert (gradient - alone).abs().max() <= tolerance * alone.abs().max()


def train(data: TensorDataset, sizes: list[int], steps_each: int) -> tuple[list[float], torch.Tensor]:
    """Adam over several epochs, the world changing every `steps_each` steps through a saved position."""
    network = model(torch.float64)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    x, y = data.tensors
    losses: list[float] = []
    state = None
    for size in sizes:
        loaders = world(size, data, state, global_batch=10)
        loops = [iter(loader) for loader in loaders]
        epoch = loaders[0].epoch
        for _ in range(steps_each):
            if loaders[0].epoch != epoch:
                loops, epoch = [iter(loader) for loader in loaders], loaders[0].epoch
            gradient, _ = averaged(network, loops, loaders)
            network.weight.grad, network.bias.grad = gradient[:-1].reshape(1, -1).clone(), gradient[-1:].clone()
            optimizer.step()
            losses.append(mse_loss(network(x).squeeze(1), y).item())
        state = json.dumps(loaders[0].state_dict())
    return losses, torch.cat([network.weight.detach().flatten(), network.bias.detach()])


def test_88_loss_curve_across_four_resizes_is_that_of_the_fixed_size() -> None:
    """60 steps over ten epochs; 10 samples a step do not divide by 3, 4, 7 or 8. Tolerance 1e-9."""
    data = dataset(54, torch.float64)
    losses, parameters = train(data, [1], 60)
    resized, others = train(data, [8, 3, 7, 1, 4], 12)
    assert losses[-1] < losses[0] / 10
    assert resized == pytest.approx(losses, rel=1e-9)
    assert torch.allclose(parameters, others, rtol=1e-9, atol=0)
