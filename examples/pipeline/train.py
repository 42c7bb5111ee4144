"""A pipeline of torch.distributed.pipelining: the layers in stages, micro-batches on their way through them.

    everstep-run --nproc-per-node 4 train.py --stages 2                        two replicas of two stages; kill one
    everstep-run --nproc-per-node 2 train.py --stages 2 --schedule interleaved two parts of the model on each rank
    kubectl apply -f job.yaml                                                  workers on a cluster; delete one

Each rank of a replica has a stage (interleaved: every N-th part), and the others' activations are sent to it.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import everstep

TRAIN, BATCH = 1440, 96  # 1,440 of 1,797 images are 15 whole batches; the others are the test set
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
        run.mesh(model=args.stages)
        replica, _ = dist.new_subgroups(args.stages)
        place = dist.get_rank(replica)
        interleaved = args.schedule == "interleaved"
        stages = PARTS if interleaved else args.stages
        each = PARTS // stages  # parts of a stage
        mine = range(place, stages, args.stages)
        modules = [nn.Sequential(*(part(i * each + j) for j in range(each))).to(run.device) for i in mine]
        model = nn.ModuleList(modules)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)

        def make() -> object:
            """For the world of now: of fewer replicas each has more rows of a batch."""
            rows = BATCH * args.stages // run.world_size // args.micro_batches
            # Between stages gradients come back, so these tensors require them; the images do not.
            images, hidden, classes = (
                torch.empty(rows, width, device=run.device, requires_grad=needed)
                for width, needed in ((WIDTH, False), (WIDTH, True), (10, True))
            )
            made = [
                PipelineStage(
                    module,
                    i,
                    stages,
                    run.device,
                    group=replica,
                    input_args=images if i == 0 else hidden,
                    output_args=classes if i == stages - 1 else hidden,
                )
                for i, module in zip(mine, modules, strict=True)
            ]
            if interleaved:
                return ScheduleInterleaved1F1B(made, args.micro_batches, loss_fn=loss_of)
            kind = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
            return kind(made[0], args.micro_batches, loss_fn=loss_of)

        def loss_of(output: Tensor, target: Tensor) -> Tensor:
            return run.scale(cross_entropy(output, target))

        schedule = run.pipeline(make)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=BATCH, seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                losses: list[Tensor] = []
                first = (pixels,) if place == 0 else ()
                schedule.step(*first, target=digits if place == args.stages - 1 else None, losses=losses)
                run.average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                if losses:
                    run.log(loss=torch.stack(losses).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--stages", type=int, choices=(1, 2, 4), default=2, help="ranks of a replica")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved"), default="1f1b")
    parts = [n for n in range(1, BATCH + 1) if BATCH % n == 0]
    parser.add_argument("--micro-batches", type=int, choices=parts, default=4, help="parts of a rank's batch")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
