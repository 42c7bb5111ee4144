"""A recurrent net goes on from the hidden state of the step before."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = torch.nn.LSTMCell(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x, hidden):
        hidden = self.cell(x, hidden)
        return self.out(hidden[0]), hidden


torch.manual_seed(0)
inputs = torch.randn(120, 4)
with everstep.start("commits", every_steps=2) as run:
    model = DistributedDataParallel(Net()) if run.world_size > 1 else Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    hidden = (torch.zeros(4, 8), torch.zeros(4, 8))
    loader = run.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch=12)
    for step in run.steps(loader, until=12):
        with step as batch:
            x, y = batch.data
            guess, hidden = model(x, tuple(part.detach() for part in hidden))
            batch.scale(mse_loss(guess, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
