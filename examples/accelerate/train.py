"""A classifier of handwritten digits in the form of Accelerate's `nlp_example.py`: its own loops over prepared objects.

everstep-run --nproc-per-node 3 train.py --cpu     three processes; kill one
kubectl apply -f job.yaml                          workers on a cluster; delete one
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from everstep.train.adapters.accelerate import start


def get_dataloaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    train, held_out = random_split(data, [1437, 360], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, shuffle=True, batch_size=batch_size), DataLoader(held_out, batch_size=batch_size)


def training_function(config: dict, args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config["lr"], total_steps=len(train_dataloader) * args.epochs
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    run = start(accelerator)
    for epoch in run.epochs(args.epochs):
        model.train()
        for images, labels in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        def evaluate(epoch: int = epoch) -> None:
            model.eval()
            right = total = 0
            for images, labels in eval_dataloader:
                with torch.no_grad():
                    outputs = model(images)
                predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), labels))
                right, total = right + (predictions == references).sum().item(), total + len(references)
            accelerator.print(f"epoch {epoch}: {right} of {total} right")

        run.evaluate(evaluate)
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--epochs", type=int, default=20)
    training_function({"lr": 1e-2, "seed": 42, "batch_size": 16}, parser.parse_args())


if __name__ == "__main__":
    main()
