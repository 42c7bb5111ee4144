"""Layouts of named dimensions over a mesh, as in Mesh-TensorFlow: the model does not say how it is divided.

    everstep-run --nproc-per-node 4 train.py --layout hidden   two replicas of two ranks; kill one process
    everstep-run --nproc-per-node 4 train.py --layout pixels   the same results from other parts of the tensors
    kubectl apply -f job.yaml                                  workers on a cluster; delete one, scale the job

Each parameter names its dimensions. The layout names the dimension that the ranks of a replica divide, wherever it
occurs; DTensor finds the communication. A commit of one layout loads in a run of any other.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set
SIZES = {"pixels": 64, "hidden": 128, "classes": 10}


class Network(nn.Module):
    """Images [rows, pixels] to the logits of [rows, classes]. `layout`: the dimension that is divided, or "none"."""

    def __init__(self, mesh: DeviceMesh, layout: str) -> None:
        super().__init__()
        self.mesh, self.layout = mesh, layout
        self.inner, self.inner_bias = self.parameter("pixels", "hidden"), self.parameter("hidden")
        self.outer, self.outer_bias = self.parameter("hidden", "classes"), self.parameter("classes")

    def parameter(self, *names: str) -> nn.Parameter:
        values = torch.randn(*(SIZES[name] for name in names)) / SIZES[names[0]] ** 0.5
        return nn.Parameter(self.laid_out(values, *names))

    def laid_out(self, values: Tensor, *names: str) -> DTensor:
        where = [Shard(names.index(self.layout)) if self.layout in names else Replicate()]
        return distribute_tensor(values, self.mesh, where, src_data_rank=None)  # all ranks have the same values

    def forward(self, images: Tensor) -> Tensor:
        x = self.laid_out(images, "rows", "pixels")
        hidden = (x @ self.inner + self.inner_bias).relu()
        logits: Tensor = (hidden @ self.outer + self.outer_bias).full_tensor()
        return logits


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # each process cuts its part out of the whole: all are to begin with the same
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        mesh = run.mesh(tensor=args.ranks)
        model = Network(mesh["tensor"], args.layout).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)
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
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a replica, which divide the tensors")
    parser.add_argument("--layout", choices=(*SIZES, "none"), default="hidden", help="the dimension that is divided")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
