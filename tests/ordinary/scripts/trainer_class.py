"""A trainer class with its loop in methods."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Trainer:
    def __init__(self, run):
        self.run = run
        self.model = DDP(torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
        run.track(model=self.model, optimizer=self.optimizer, schedule=self.schedule)

    def train_step(self, batch):
        data, target = batch.data
        self.optimizer.zero_grad()
        batch.scale(mse_loss(self.model(data), target)).backward()
        self.optimizer.step()
        self.schedule.step()

    def fit(self):
        for step in self.run.steps(self.run.loader(dataset, global_batch=12), until=12):
            with step as batch:
                self.train_step(batch)


def main():
    with everstep.start("commits", every_steps=4) as run:
        Trainer(run).fit()


if __name__ == "__main__":
    main()
