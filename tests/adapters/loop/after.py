"""A script in the form of Accelerate's `nlp_example.py`: its own loops, its evaluation inside of them."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from everstep.train.adapters.accelerate import start


class Accuracy:
    """In the form of the metrics of `evaluate`: what is added counts until it is computed."""

    def __init__(self):
        self.right = self.total = 0

    def add_batch(self, predictions, references):
        self.right += (predictions == references).sum().item()
        self.total += len(references)

    def compute(self):
        result = f"accuracy {self.right / self.total:.4f} of {self.total}"
        self.right = self.total = 0
        return result


def get_dataloaders(batch_size: int):
    x = torch.randn(89, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    train, held = torch.utils.data.Subset(data, range(69)), torch.utils.data.Subset(data, range(69, 89))
    return DataLoader(train, shuffle=True, batch_size=batch_size), DataLoader(held, batch_size=3)


def training_function(config):
    accelerator = Accelerator(cpu=True)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    run = start(accelerator, "commits", every_steps=100)
    for epoch in run.epochs(config["num_epochs"]):
        model.train()
        for inputs, labels in train_dataloader:
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        def evaluate(epoch=epoch):
            metric = Accuracy()
            model.eval()
            for inputs, labels in eval_dataloader:
                with torch.no_grad():
                    outputs = model(inputs)
                predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), labels))
                metric.add_batch(predictions=predictions, references=references)
            accelerator.print(f"epoch {epoch}: {metric.compute()}")

        run.evaluate(evaluate)
    accelerator.end_training()


if __name__ == "__main__":
    training_function({"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 4})
