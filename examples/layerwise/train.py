"""Naive model parallelism: the layers of a model divided among the ranks of a replica, which work one after another.

    everstep-run --nproc-per-node 4 train.py --ranks 2     two replicas of two ranks; kill one process
    everstep-run --nproc-per-node 2 train.py --ranks 2     one replica: a lost process costs a load of the last commit
    kubectl apply -f job.yaml                              workers on a cluster; delete one, scale the job

It is for models that do not fit on one device, where speed does not matter: of N ranks, one works at a time. A pipeline
(examples/pipeline) lets them work at the same time.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set
WIDTH, PARTS = 64, 4


def part(index: int) -> nn.Module:
    """One of the model's PARTS, [rows, WIDTH] to [rows, WIDTH], and the last to [rows, 10]. Each has its own seed, so
    that a process makes its own parts and no other."""
    torch.manual_seed(index)
    layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    return layers if index < PARTS - 1 else nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        run.mesh(model=args.ranks)
        replica, _ = dist.new_subgroups(args.ranks)
        place = dist.get_rank(replica)
        each = PARTS // args.ranks
        model = nn.Sequential(*(part(place * each + i) for i in range(each))).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)

        def received(source: int, rows: int) -> Tensor:
            tensor = torch.empty(rows, WIDTH, device=run.device)
            dist.recv(tensor, group=replica, group_src=source)
            return tensor

        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                given = pixels if place == 0 else received(place - 1, len(pixels)).requires_grad_()
                output = model(given)
                if place < args.ranks - 1:
                    dist.send(output.detach(), group=replica, group_dst=place + 1)
                    output.backward(received(place + 1, len(pixels)))
                else:
                    loss = batch.scale(cross_entropy(output, digits))
                    loss.backward()
                    run.log(loss=loss)
                if place > 0:
                    dist.send(given.grad, group=replica, group_dst=place - 1)
                run.average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2, help="ranks of a replica")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
