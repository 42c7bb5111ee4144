"""A Horovod script that is not elastic, as it would be written for Horovod. It keeps a file of its own each epoch.

everstep-run --nproc-per-node 3 -m everstep_horovod plain.py    kill a process: all begin again from that file
"""

import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data.distributed import DistributedSampler

TRAIN = 1440  # of 1,797 images; the others are the test set

parser = argparse.ArgumentParser(description="Digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32, help="images of a rank's batch")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.02, help="of one rank; it grows with their number")
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
train_dataset = torch.utils.data.TensorDataset(x[:TRAIN], y[:TRAIN])
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
test_dataset = torch.utils.data.TensorDataset(x[TRAIN:], y[TRAIN:])
test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=100, sampler=test_sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)

found = [epoch for epoch in range(args.epochs) if os.path.exists(args.checkpoint_format.format(epoch=epoch))]
first_epoch = hvd.broadcast(torch.tensor(max(found, default=-1) + 1), root_rank=0, name="first_epoch").item()
if first_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=first_epoch - 1))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scheduler.last_epoch = first_epoch
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test():
    model.eval()
    right = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            right += (model(data).argmax(1) == target).sum().item()
    accuracy = metric_average(right / len(test_sampler), "accuracy")
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.3f} after epoch {epoch}")


for epoch in range(first_epoch, args.epochs):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    scheduler.step()
    test()
    if hvd.rank() == 0:
        file = args.checkpoint_format.format(epoch=epoch)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file + ".part")
        os.replace(file + ".part", file)  # else a process that is killed here leaves half a file
