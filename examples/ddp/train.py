"""Data parallelism with what real scripts add to it: accumulated gradients, clipping, a warm-up, an evaluation; and
options for layers that are left out, a hook on gradients, a static graph, DDP's join and the size of buckets.

python train.py                              one process
everstep-run --nproc-per-node 3 train.py     three processes; kill one
kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1345  # of 1,797 images: 15 batches, the last with one image for all ranks; the others are the test set


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797]."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels)


class Network(torch.nn.Module):
    """Images [rows, 64] to classes [rows, 10]. Without `deep` the middle layer is left out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(dropout))
        self.middle = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU())
        self.last = torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.middle(x) if deep else x)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = digits()
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = Network(args.dropout).to(run.device)
        for parameter in network.first.parameters():  # runs on each rank, before gradients are averaged
            parameter.register_hook(lambda gradient: args.first * gradient)
        model = network
        if dist.is_initialized():
            model = DistributedDataParallel(
                network,
                bucket_cap_mb=args.bucket_mb,
                find_unused_parameters=args.leave_out > 0,
                static_graph=args.static_graph,
            )
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        schedule = LinearLR(optimizer, start_factor=0.1, total_iters=20)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, micro_batch=8, seed=0)

        def evaluate() -> dict[str, float]:
            network.eval()
            mine = slice(TRAIN + run.rank, None, run.world_size)
            with torch.no_grad():
                right = (network(x[mine].to(run.device), True).argmax(1).cpu() == y[mine]).sum().float()
            if dist.is_initialized():
                dist.all_reduce(right)
            return {"accuracy": right.item() / (len(x) - TRAIN)}

        run.evaluate(evaluate, every=50)
        for step in run.steps(data, until=args.steps):
            with step as batches:
                # All ranks leave the same layer out: with a static graph in each step, else in some of them.
                deep = torch.rand((), generator=run.shared_rng).item() >= args.leave_out
                # With --join a rank without samples makes no pass, and takes the others' gradients at the join's end.
                joined = contextlib.nullcontext() if not args.join or model is network else model.join()
                loss = torch.zeros((), device=run.device)
                with joined:
                    for batch in batches:
                        if args.join and batch.weight == 0:
                            continue
                        images, labels = batch.to(run.device).data
                        # Gradients travel once a step, in the backward pass of its last part. torch's static graph
                        # cannot be without them: it averages the sum so far in each pass, which comes to the same. Nor
                        # can a join whose ranks have different last parts.
                        sync = batch.last or args.static_graph or args.join or model is network
                        quiet = contextlib.nullcontext() if sync else model.no_sync()
                        with quiet:
                            loss = batch.scale(cross_entropy(model(images, deep), labels))
                            loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--leave-out", type=float, default=0.0, help="share of the steps without the middle layer")
    parser.add_argument("--first", type=float, default=1.0, help="factor of the first layer's gradients")
    parser.add_argument("--static-graph", action="store_true", help="the same parameters are used in all steps")
    parser.add_argument("--join", action="store_true", help="ranks without samples make no pass: DDP's join")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="gradients that travel together")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    args = parser.parse_args()
    if args.static_graph and 0 < args.leave_out < 1:
        parser.error("--static-graph: the graph changes with such a --leave-out; give 0 or 1 to that")
    main(args)
