"""Trains examples/zero for two steps without a session, and says how many bytes of its state each rank holds: over the
micro-batches of a step, and between two steps; and by how much its parameters differ from those of the first stage.

    everstep-run … zero_memory.py FILE STAGES URL

STAGES: such as 3,2,1,1+offload,torch; `torch` is torch's own stage 1 (ZeroRedundancyOptimizer). With a URL it loads
that commit before, saves what it has loaded in URL-N for N ranks, and says nothing.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import everstep
from everstep.torch_private.sharded import shards_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "zero"))
from train import build, build_replicated, divide


def held(tensors: list[torch.Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Those that are divided, and those that are whole until the last micro-batch of the step."""
    records = [p for module in model.modules() for p in shards_of(module)]
    found = [holder.grad for p in records for holder in (p.sharded_param, p.unsharded_param)]
    return [gradient for gradient in found if gradient is not None]


def measured(stage: int, offload: bool) -> tuple[dict[str, dict[str, int]], list[torch.Tensor]]:
    """Bytes of each part, and the whole parameters at the end."""
    model, optimizer = made(stage, offload)
    for step in range(2):
        torch.manual_seed(100 * step + dist.get_rank())
        for micro in range(2):
            divide(model, stage, last=micro == 1)
            model(torch.randn(8, 64)).square().mean().backward()
            if micro == 0:
                within = {"parameters": held(list(model.parameters())), "gradients": held(gradients(model))}
        between = {"parameters": held(list(model.parameters())), "gradients": held(gradients(model))}
        optimizer.step()
        optimizer.zero_grad()
    state = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    told = {"within": within, "between": between | {"optimizer": held(state)}}
    return told, [p.full_tensor() for p in model.parameters()]


def replicated() -> tuple[dict[str, dict[str, int]], list[torch.Tensor]]:
    """As `measured`, of torch's own stage 1."""
    torch.manual_seed(0)
    model, optimizer = build_replicated(torch.device("cpu"))
    for step in range(2):
        torch.manual_seed(100 * step + dist.get_rank())
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                model(torch.randn(8, 64)).square().mean().backward()
        parameters = [p.detach() for p in model.parameters()]
        whole = {"parameters": held(parameters), "gradients": held([p.grad for p in model.parameters()])}
        optimizer.step()
        optimizer.zero_grad()
    state = [t for s in optimizer.optim.state.values() for k, t in s.items() if k != "step"]
    return {"within": whole, "between": whole | {"optimizer": held(state)}}, parameters


def made(stage: int, offload: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return build(mesh, stage, torch.device("cpu"), offload)


out, stages, *url = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
world = dist.get_world_size()
if url:
    model, optimizer = made(int(stages), offload=False)
    # The optimizer has its state when it has stepped; then both are filled from the commit.
    everstep.load(url[0], {"model": model, "optimizer": optimizer})
    checkpointer = everstep.Checkpointer(f"{url[0]}-{world}")
    checkpointer.save(1, {"model": model, "optimizer": optimizer})
    checkpointer.close()
else:
    told: dict[str, object] = {}
    first: list[torch.Tensor] = []
    for name in stages.split(","):
        stage, _, offload = name.partition("+")
        sizes, parameters = replicated() if stage == "torch" else measured(int(stage), bool(offload))
        first = first or parameters
        furthest = max(float((p - q).abs().max()) for p, q in zip(parameters, first, strict=True))
        told[name] = {**sizes, "furthest": furthest}
    Path(f"{out}-{world}-{dist.get_rank()}.json").write_text(json.dumps(told))
dist.destroy_process_group()
