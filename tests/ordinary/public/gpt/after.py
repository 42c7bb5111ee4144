"""A small language model of characters: autocast, a scaler, clipped gradients, evaluation on shares. For torchrun."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler

import everstep

TEXT = "to train is to repeat a step until it is no step at all, and to be stopped is to begin it again. " * 2


@dataclass
class Config:
    epochs: int = 3
    batch: int = 12
    block: int = 12
    width: int = 16
    clip: float = 1.0
    amp: bool = True
    snapshot: str = "snapshot.bin"


class Characters(Dataset):
    def __init__(self, text, block):
        self.letters = sorted(set(text))
        self.codes = torch.tensor([self.letters.index(c) for c in text])
        self.block = block

    def __len__(self):
        return len(self.codes) - self.block

    def __getitem__(self, i):
        piece = self.codes[i : i + self.block + 1]
        return piece[:-1], piece[1:]


class Gpt(torch.nn.Module):
    def __init__(self, letters, config):
        super().__init__()
        self.letter = torch.nn.Embedding(letters, config.width)
        self.place = torch.nn.Parameter(torch.zeros(config.block, config.width))
        self.norm = torch.nn.LayerNorm(config.width)
        self.attention = torch.nn.MultiheadAttention(config.width, 2, batch_first=True)
        self.drop = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(config.width, letters)
        self.register_buffer("mask", torch.ones(config.block, config.block, dtype=torch.bool).triu(1))

    def forward(self, codes, targets):
        x = self.letter(codes) + self.place
        y = self.norm(x)
        x = x + self.drop(self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0])
        logits = self.head(x)
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config, model, optimizer, train_set, test_set):
        self.config = config
        self.train_loader = self._loader(train_set)
        self.test_loader = self._loader(test_set)
        self.optimizer = optimizer
        self.first_epoch = 0
        self.scaler = torch.amp.GradScaler("cpu", enabled=config.amp)
        self.model = model
        self._load_snapshot()
        self.model = DistributedDataParallel(model)
        self.run = everstep.current()
        self.run.track(model=self.model, optimizer=self.optimizer, scaler=self.scaler)

    def _loader(self, dataset):
        return DataLoader(dataset, batch_size=self.config.batch, sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        try:
            found = torch.load(self.config.snapshot)
        except FileNotFoundError:
            return
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.first_epoch = found["epochs"]

    def _save_snapshot(self, epoch):
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epochs": epoch + 1}
        torch.save(state, self.config.snapshot)
        with open("snapshots.txt", "a") as log:
            log.write(f"epoch {epoch}\n")

    def _run_batch(self, codes, targets, train):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", torch.bfloat16, enabled=self.config.amp):
            _, loss = self.model(codes, targets)
        if train:
            self.optimizer.zero_grad()
            self.scaler.scale(self.run.scale(loss)).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def _run_epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)

        def work(batch):
            number, loss = batch.step, self._run_batch(*batch.data, train)
            if number == 0:
                print(f"epoch {epoch}: {'train' if train else 'test'} {loss:.4f}")

        self.run.train(work) if train else self.run.evaluate(work, loader)

    def train(self):
        for epoch in self.run.epochs(self.train_loader, self.config.epochs):
            self._run_epoch(epoch, self.train_loader, train=True)
            if os.environ["RANK"] == "0":
                self._save_snapshot(epoch)
            self._run_epoch(epoch, self.test_loader, train=False)


def main():
    everstep.start("commits", every_steps=4)
    torch.manual_seed(0)
    config = Config()
    dataset = Characters(TEXT, config.block)
    train_set, test_set = random_split(dataset, [144, len(dataset) - 144])
    model = Gpt(len(dataset.letters), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    Trainer(config, model, optimizer, train_set, test_set).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
