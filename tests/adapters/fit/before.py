"""Trains a classifier by Lightning on every process that torchrun started, in the form of Lightning's own examples."""

from argparse import ArgumentParser

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset, random_split


class Blobs(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        drawn = torch.Generator().manual_seed(7)
        y = torch.randint(0, 4, (168,), generator=drawn)
        x = torch.randn(168, 8, generator=drawn) + F.one_hot(y, 8)
        parts = random_split(TensorDataset(x, y), [96, 36, 36], generator=drawn)
        self.train_set, self.val_set, self.test_set = parts

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.hparams.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, hidden_dim, learning_rate):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, hidden_dim), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(hidden_dim, 4)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self._evaluate(batch, "test")

    def _evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        self.log(f"{stage}_loss", F.cross_entropy(logits, y), prog_bar=True, sync_dist=True)
        self.log(f"{stage}_acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return [optimizer], [scheduler]


def main():
    parser = ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--hidden_dim", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--max_epochs", type=int, default=3)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=3)
    args = parser.parse_args()

    L.seed_everything(1234)
    model = Classifier(args.hidden_dim, args.learning_rate)
    data = Blobs(args.batch_size)
    checkpoint = ModelCheckpoint(monitor="val_loss", save_last=True)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.max_epochs,
        log_every_n_steps=1,
        callbacks=[checkpoint, LearningRateMonitor()],
    )
    trainer.fit(model, datamodule=data)
    trainer.test(datamodule=data, ckpt_path="best")


if __name__ == "__main__":
    main()
