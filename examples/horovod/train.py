"""An elastic Horovod script, as it would be written for Horovod: no line of it is Everstep's.

everstep-run --nproc-per-node 3 -m everstep_horovod train.py    three processes; kill one
kubectl apply -f job.yaml                                              workers on a cluster; delete one, scale the job
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

TRAIN = 1440  # of 1,797 images; the others are the test set

parser = argparse.ArgumentParser(description="Digits with elastic Horovod")
parser.add_argument("--batch-size", type=int, default=32, help="images of a rank's batch")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--lr", type=float, default=0.02, help="of one rank; it grows with their number")
parser.add_argument("--batches-per-commit", type=int, default=1)
parser.add_argument("--fp16-allreduce", action="store_true", help="halve what travels")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
train_dataset = torch.utils.data.TensorDataset(x[:TRAIN], y[:TRAIN])
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs):
        state.model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            train_sampler.record_batch(batch_idx, args.batch_size)
            if (batch_idx + 1) % args.batches_per_commit == 0:
                state.commit()
        train_sampler.set_epoch(state.epoch + 1)


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


def test():
    model.eval()
    mine = slice(TRAIN + hvd.rank(), None, hvd.size())
    with torch.no_grad():
        right = (model(x[mine]).argmax(1) == y[mine]).sum().float()
    accuracy = hvd.allreduce(right, op=hvd.Sum).item() / (len(x) - TRAIN)
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.3f} of {hvd.size()} ranks")


state = hvd.elastic.TorchState(model, optimizer, sampler=train_sampler, epoch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
test()
