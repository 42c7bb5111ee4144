"""DeepSpeed learns handwritten digits with ZeRO, and saves and loads checkpoints as its documentation shows.

everstep-run --nproc-per-node 3 --max-restarts 3 train.py     three processes; kill one
kubectl apply -f job.yaml                                     workers on a cluster; delete one
"""

import argparse

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # On CPUs DeepSpeed would compile kernels of its inference here, and wait for ever where that was once interrupted.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage},
        "gradient_clipping": 1.0,
    }
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    engine.load_checkpoint(args.save_dir)

    steps = args.epochs * len(loader)
    for epoch in range(engine.global_steps // len(loader), args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader, start=epoch * len(loader)):
            if i < engine.global_steps:
                continue  # before the checkpoint
            loss = cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            everstep.report(step=engine.global_steps, total_steps=steps, epoch=epoch, metrics={"loss": loss})
            if engine.global_steps % args.save_interval == 0 or engine.global_steps == steps:
                engine.save_checkpoint(args.save_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--save_interval", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--save_dir", default="checkpoints", help="a folder that all processes see")
    main(parser.parse_args())
