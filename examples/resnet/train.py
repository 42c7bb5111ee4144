"""A small residual network learns coloured images: BatchNorm, augmentation, SGD with one cycle, evaluation, curves.

python train.py                              one process
everstep-run --nproc-per-node 3 train.py     three processes; kill one
kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job
"""

import argparse

import torch
import torch.distributed as dist
from curves import curves
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad, relu
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

import everstep

TRAIN, SIDE = 1440, 16  # 1,440 of 1,797 images are 15 whole batches; the others are the test set


def coloured_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 3, SIDE, SIDE] in 0..1, digits of one colour on a darker ground of another, and labels [1797]."""
    digits, labels = load_digits(return_X_y=True)
    shape = interpolate(torch.from_numpy(digits).float().view(-1, 1, 8, 8) / 16, size=SIDE, mode="bilinear")
    ink, ground = torch.rand(2, len(shape), 3, 1, 1, generator=torch.Generator().manual_seed(0))
    return shape * (1 + ink) / 2 + (1 - shape) * ground / 2, torch.from_numpy(labels)


class Residual(nn.Module):
    """[rows, before, height, width] to [rows, after, height / stride, width / stride]."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.body(x) + self.short(x))


def resnet() -> nn.Module:
    layers = [Residual(3, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def augmented(images: Tensor) -> Tensor:
    """Each image is moved by up to two pixels, and its colours are dimmed. The session seeds the numbers drawn here."""
    wide = pad(images, (2, 2, 2, 2), mode="replicate")
    moves = torch.randint(0, 5, (len(images), 2)).tolist()
    moved = [image[:, y : y + SIDE, x : x + SIDE] for image, (y, x) in zip(wide, moves, strict=True)]
    return torch.stack(moved) * (0.7 + 0.3 * torch.rand(len(images), 3, 1, 1))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = coloured_digits()
    # Each rank draws numbers of its own, by seed, step and rank.
    with everstep.start(args.checkpoint, every_steps=args.every_steps, rng="rank") as run:
        network = resnet().to(run.device)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True)
        rate = OneCycleLR(optimizer, max_lr=0.2, total_steps=args.steps + 1)
        run.track(model=model, optimizer=optimizer, rate=rate)
        log, log_evaluation = curves(run, args.curves)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)

        def evaluate() -> dict[str, float]:
            network.eval()
            mine = slice(TRAIN + run.rank, None, run.world_size)
            with torch.no_grad():
                right = (network(x[mine].to(run.device)).argmax(1).cpu() == y[mine]).sum().float()
            if dist.is_initialized():
                dist.all_reduce(right)
            accuracy = right.item() / (len(x) - TRAIN)
            if run.rank == 0:
                print(f"step {run.step}: accuracy {accuracy:.4f}", flush=True)
            log_evaluation(accuracy=accuracy)
            return {"accuracy": accuracy}

        run.evaluate(evaluate, every=args.evaluate_every)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                images, labels = batch.data
                loss = cross_entropy(model(augmented(images).to(run.device)), labels.to(run.device))
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
                run.log(loss=loss, rate=rate.get_last_lr()[0])
            log(step, loss=loss, rate=rate.get_last_lr()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--curves", help="a folder or URL that all workers reach, for TensorBoard")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
