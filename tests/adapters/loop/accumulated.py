"""A script in the form of Accelerate's `run_glue_no_trainer.py`: it accumulates, clips, and counts what it has done."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from everstep.train.adapters.accelerate import start


class Average:
    """Of the weights of a layer, over the steps; as scripts write it, with a state for checkpoints."""

    def __init__(self, layer):
        self.weight, self.steps = layer.weight.detach().clone(), 0

    def add(self, layer):
        self.weight, self.steps = 0.9 * self.weight + 0.1 * layer.weight.detach(), self.steps + 1

    def state_dict(self):
        return {"weight": self.weight, "steps": self.steps}

    def load_state_dict(self, state):
        self.weight, self.steps = state["weight"], state["steps"]


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    x = torch.randn(141, 8, generator=torch.Generator().manual_seed(1))
    train_dataloader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), shuffle=True, batch_size=4)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )
    average = Average(model[0])
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    accelerator.register_for_checkpointing(average)

    run = start(accelerator, "commits", every_steps=100)
    carried = {"completed": 0}
    sums = {"loss": 0.0}
    run.track(carried=carried, sums=sums)
    for _ in run.epochs(2):
        model.train()
        for step, (inputs, labels) in enumerate(train_dataloader):
            if run.micro == 0:
                parts, losses = [], []
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    sums["loss"] += sum(losses)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            parts.append(len(labels))
            if accelerator.sync_gradients:
                print(f"step {carried['completed']} took {sum(parts)}")
                average.add(accelerator.unwrap_model(model)[0])
                carried["completed"] += 1
            if step % 50 == 0:
                accelerator.print(f"loss {loss.item():.4f}")
    print(f"completed {carried['completed']}")
    print(f"losses {sums['loss']!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
