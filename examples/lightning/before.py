"""A LightningModule learns handwritten digits with a Trainer, in the form of Lightning's own examples.

torchrun --nproc-per-node 3 before.py --devices 3     three processes
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitClassifier(L.LightningModule):
    def __init__(self, hidden_dim: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, hidden_dim), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(hidden_dim, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = (self(images).argmax(dim=1) == labels).float().mean()
        self.log("val_acc", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return [optimizer], [schedule]


def main(args: argparse.Namespace) -> None:
    L.seed_everything(42)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    train, held_out = random_split(data, [1437, 360], generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp",
        max_epochs=args.max_epochs,
        default_root_dir=args.default_root_dir,
    )
    trainer.fit(
        LitClassifier(hidden_dim=128, learning_rate=1e-2),
        DataLoader(train, batch_size=16, shuffle=True),
        DataLoader(held_out, batch_size=16),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="processes on each node")
    parser.add_argument("--num_nodes", type=int, default=1, help="nodes, or pods")
    parser.add_argument("--max_epochs", type=int, default=20)
    parser.add_argument("--default_root_dir", default=".", help="the folder for Lightning's logs and checkpoints")
    main(parser.parse_args())
