"""A trainer class with snapshots by epoch, as tutorials of DistributedDataParallel have it. For torchrun."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, SAVE_EVERY, BATCH = 4, 2, 4


class Trainer:
    def __init__(self, model, loader, optimizer, snapshot):
        self.loader = loader
        self.optimizer = optimizer
        self.snapshot = snapshot
        self.first_epoch = 0
        if os.path.exists(snapshot):
            self._load_snapshot(model)
        self.model = DistributedDataParallel(model)

    def _load_snapshot(self, model):
        found = torch.load(self.snapshot)
        model.load_state_dict(found["model"])
        self.first_epoch = found["epochs"]

    def _save_snapshot(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epochs": epoch + 1}, self.snapshot)
        with open("snapshots.txt", "a") as log:
            log.write(f"epoch {epoch}\n")

    def _run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        rows = len(next(iter(self.loader))[0])
        print(f"epoch {epoch}: {len(self.loader)} steps of {rows} rows")
        self.loader.sampler.set_epoch(epoch)
        for inputs, targets in self.loader:
            self._run_batch(inputs, targets)

    def train(self, epochs):
        for epoch in range(self.first_epoch, epochs):
            self._run_epoch(epoch)
            if os.environ["RANK"] == "0" and (epoch + 1) % SAVE_EVERY == 0:
                self._save_snapshot(epoch)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(40, 8)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    trainer = Trainer(model, loader, optimizer, "snapshot.bin")
    trainer.train(EPOCHS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
