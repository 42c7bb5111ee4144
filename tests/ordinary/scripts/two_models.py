"""An encoder and a decoder, each in its own DDP, with one optimizer."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    encoder = DDP(torch.nn.Linear(8, 4))
    decoder = DDP(torch.nn.Linear(4, 8))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    run.track(encoder=encoder, decoder=decoder, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data = batch.data[0]
            batch.scale(mse_loss(decoder(encoder(data).tanh()), data)).backward()
            optimizer.step()
            optimizer.zero_grad()
