"""The weights against real DDP: gloo, an uneven remainder, micro-batches under `no_sync`, fillers (failure 88)."""

import multiprocessing
import traceback
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from everstep.data import ElasticLoader

N, BATCH = 32, 10  # the last step has 2 samples: fewer than the three ranks


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1) + 0.5)


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1, dtype=torch.float64)


def gradients(network: torch.nn.Module, loader: ElasticLoader) -> list[list[float]]:
    """What each step leaves in the weight's gradient, the parameters staying as they are."""
    found = []
    for batch in loader:
        x, y = batch.data
        local = isinstance(network, DistributedDataParallel) and not batch.last
        with network.no_sync() if local else nullcontext():  # type: ignore[operator]
            batch.scale(mse_loss(network(x).squeeze(1), y)).backward()
        if batch.last:
            found.append(next(network.parameters()).grad.flatten().tolist())  # type: ignore[union-attr]
            network.zero_grad()
    return found


def rank_main(rank: int, world: int, store: str, micro_batch: int | None, answer: Connection) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
        loader = ElasticLoader(dataset(), global_batch=BATCH, micro_batch=micro_batch)
        assert (loader.world.rank, loader.world.size) == (rank, world)
        answer.send(gradients(DistributedDataParallel(model()), loader))
        dist.barrier()
    except BaseException:
        answer.send(traceback.format_exc())


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_88_ddp_gradient_is_that_of_one_process(
    micro_batch: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    world, context = 3, multiprocessing.get_context("fork")
    processes, answers = [], []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        args = (rank, world, str(tmp_path / "store"), micro_batch, send)
        processes.append(context.Process(target=rank_main, args=args, daemon=True))
        answers.append(receive)
        processes[-1].start()
        send.close()
    try:
        found = []
        for answer in answers:
            assert answer.poll(90), "a rank did not answer"
            found.append(answer.recv())
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
    assert all(isinstance(f, list) for f in found), found
    alone = gradients(model(), ElasticLoader(dataset(), global_batch=BATCH, rank=0, world_size=1))
    assert len(alone) == 4
    for steps in found:
        for ours, wanted in zip(steps, alone, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-12)
