import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import everstep

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(96, 4)
targets = inputs.sum(1, keepdim=True)
rare = targets[:, 0] > 1
sampler = WeightedRandomSampler(torch.where(rare, 4.0, 1.0), len(inputs))
loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, sampler=sampler)

with everstep.start("commits", every_steps=4) as run:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(loader, until=16):
        with step as batch:
            x, y = batch.data
            batch.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
