"""A target network, copied every fourth step, as in deep Q-learning."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

with everstep.start("commits", every_steps=4) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    target_net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    target_net.load_state_dict(model.module.state_dict())
    run.track(model=model, target_net=target_net, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=12):
        with step as batch:
            data, reward = batch.data
            with torch.no_grad():
                wanted = reward + 0.5 * target_net(data)
            batch.scale(mse_loss(model(data), wanted)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.number % 4 == 3:
                target_net.load_state_dict(model.module.state_dict())
