"""Gathers embeddings of all ranks with gradients, for a contrastive loss."""

import torch
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            embeddings = torch.nn.functional.normalize(model(batch.data[0]), dim=1)
            everyone = torch.cat(all_gather(embeddings))
            labels = run.rank * len(embeddings) + torch.arange(len(embeddings))
            torch.nn.functional.cross_entropy(embeddings @ everyone.T / 0.1, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
