"""In the style of timm's train.py: ModelEmaV2, mixup, an AverageMeter, a torchmetrics-like metric, two schedules."""

import copy
import time

import torch
from torch import nn

import everstep


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.99):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    def update(self, model):
        with torch.no_grad():
            for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
                ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = self.avg = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class ConfusionMatrix(nn.Module):
    """As torchmetrics': states are attributes, and reset each epoch."""

    def __init__(self, classes):
        super().__init__()
        self.confmat = torch.zeros(classes, classes, dtype=torch.int64)
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))

    def update(self, preds, target):
        classes = len(self.confmat)
        self.confmat += torch.bincount(target * classes + preds, minlength=classes**2).view(classes, classes)
        self.total += len(target)

    def reset(self):
        self.confmat.zero_()
        self.total.zero_()


def main():
    with everstep.start(URL, every_steps=EVERY) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        teacher = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
        model_ema = ModelEmaV2(model)
        criterion, class_weights = nn.CrossEntropyLoss(), torch.tensor([1.0, 2.0, 0.5])
        losses_m, batch_time_m, confusion = AverageMeter(), AverageMeter(), ConfusionMatrix(3)
        track(run, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, model_ema=model_ema)
        mean, std = torch.zeros(6), torch.ones(6)
        data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
        end = time.time()
        for step in run.steps(run.loader(data, global_batch=8), until=9):
            with step as batch:
                input, target = batch.data
                input = (input - mean) / std
                mixed = 0.7 * input + 0.3 * input.flip(0)
                output = model(mixed)
                loss = (criterion(output, target) * class_weights[0]) + 0.1 * (output - teacher(mixed)).pow(2).mean()
                optimizer.zero_grad()
                batch.scale(loss).backward()
                optimizer.step()
                model_ema.update(model)
                losses_m.update(loss.item(), input.size(0))
                confusion.update(output.argmax(1), target)
                batch_time_m.update(time.time() - end)
                lr_scheduler.step()
            if step.number == 5:
                confusion.reset()


main()
