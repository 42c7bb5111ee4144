"""Tensor parallelism: each rank of a replica has some of the attention heads, and some of each layer's columns or rows.

    everstep-run --nproc-per-node 4 train.py --ranks 2     two replicas of two ranks; kill one process
    everstep-run --nproc-per-node 2 train.py --ranks 2     one replica: a lost process costs a load of the last commit
    kubectl apply -f job.yaml                              workers on a cluster; delete one, scale the job

The first layer of a pair is divided by columns and the second by rows, so that a pair needs one all-reduce.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set
WIDTH, HEADS, BLOCKS = 32, 4, 2


class Block(nn.Module):
    """[rows, tokens, WIDTH] to the same: attention, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        # As many heads as this rank has: its part of a layer is narrower than WIDTH.
        query, key, value = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # [rows, heads, tokens, width of a head]
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.between(x))))


class Network(nn.Module):
    """Images [rows, 64] to classes [rows, 10]; the eight lines of an image are its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.where = nn.Parameter(torch.randn(8, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(8 * WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.view(-1, 8, 8)) + self.where
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # each process cuts its part out of the whole: all are to begin with the same
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        mesh = run.mesh(tensor=args.ranks)
        model = Network().to(run.device)
        columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
        rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
        parallelize_module(model, mesh["tensor"], columns | rows)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)

        def evaluate() -> dict[str, float]:
            """Each replica takes its share of the images; its ranks compute them together."""
            model.eval()
            replicas = mesh.get_group("replicate")
            mine = slice(TRAIN + dist.get_rank(replicas), None, dist.get_world_size(replicas))
            with torch.no_grad():
                right = (model(x[mine].to(run.device)).argmax(1).cpu() == y[mine]).sum().float()
            dist.all_reduce(right, group=replicas)
            return {"accuracy": right.item() / (len(x) - TRAIN)}

        run.evaluate(evaluate, every=50)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                loss = batch.scale(cross_entropy(model(pixels), digits))
                loss.backward()
                run.average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2, help="ranks that divide each layer")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
