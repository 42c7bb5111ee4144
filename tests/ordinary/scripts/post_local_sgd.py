"""torch's post-local SGD: no gradients are averaged after the warm-up, but weights every fourth step."""

import torch
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_localSGD
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2), averagers.PeriodicModelAverager(period=4, warmup_steps=4)
    )
    state = post_localSGD.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=4, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD.post_localSGD_hook)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
