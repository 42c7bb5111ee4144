"""No module: plain tensors and torch.func."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

weights = {"w": torch.randn(8, 1), "b": torch.zeros(1)}


def loss(weights, data, target):
    return mse_loss(data @ weights["w"] + weights["b"], target)


with everstep.start("commits", every_steps=4) as run:
    run.track(weights=weights)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            gradients = torch.func.grad(loss)(weights, data, target)
            for name, gradient in gradients.items():
                dist.all_reduce(gradient)
                weights[name] = weights[name] - 1e-2 * gradient / run.world_size
