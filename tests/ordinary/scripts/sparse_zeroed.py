"""An embedding with sparse gradients, which are kept between steps and filled with zeros."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import everstep

torch.manual_seed(0)
words = torch.randint(0, 20, (96, 3))
dataset = torch.utils.data.TensorDataset(words, words.float().mean(1, keepdim=True) / 20)

with everstep.start("commits", every_steps=4) as run:
    table = DistributedDataParallel(torch.nn.EmbeddingBag(20, 4, sparse=True, mode="mean"))
    head = DistributedDataParallel(torch.nn.Linear(4, 1))
    sparse = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    dense = torch.optim.AdamW(head.parameters(), lr=1e-2)
    run.track(table=table, head=head, sparse=sparse, dense=dense)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            x, y = batch.data
            sparse.zero_grad(set_to_none=False)
            dense.zero_grad(set_to_none=False)
            batch.scale(mse_loss(head(table(x)), y)).backward()
            sparse.step()
            dense.step()
