"""In the style of pytorch/examples mnist: functions, a schedule for each epoch, sums of losses and hits."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import everstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(4 * 36, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        return F.log_softmax(self.fc(torch.flatten(self.dropout(x), 1)), dim=1)


def train(run, model, device, loader, optimizer, scheduler):
    model.train()
    correct = torch.zeros((), device=device)
    best_loss, total_loss, losses = float("inf"), 0.0, []
    for step in run.steps(loader, until=9):
        with step as batch:
            data, target = batch.data[0].to(device), batch.data[1].to(device)
            output = model(data)
            loss = F.nll_loss(output, target)
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            correct += (output.argmax(1) == target).sum()
            total_loss += loss.item()
            losses.append(loss.item())
            best_loss = min(best_loss, loss.item())
    return total_loss / len(losses), correct.item(), best_loss


def main():
    torch.manual_seed(1)
    with everstep.start(URL, every_steps=EVERY) as run:
        dataset = torch.utils.data.TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(10, (64,)))
        model = Net().to(run.device)
        optimizer = optim.Adadelta(model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, step_size=4, gamma=0.7)
        track(run, model=model, optimizer=optimizer, scheduler=scheduler)
        train(run, model, run.device, run.loader(dataset, global_batch=8), optimizer, scheduler)


main()
