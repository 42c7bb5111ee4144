"""Horovod's exceptions, and the refusals of what is not here."""

from __future__ import annotations

from everstep.recovery.errors import LoopError


class HorovodInternalError(RuntimeError):
    """A collective has failed because a peer was lost. `hvd.elastic.run` catches it; elsewhere it ends the process."""


class HostsUpdatedInterrupt(Exception):
    """The world has changed, and all ranks have come to the same commit. `hvd.elastic.run` catches it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the world has changed")
        self.skip_sync = skip_sync


# What a script may ask of `horovod.torch` that is not here, and what to write instead.
INSTEAD = {
    "Adasum": "use op=hvd.Average, with a learning rate that is scaled by hvd.size()",
    "ProcessSet": "all ranks run a collective here. Groups of some ranks: everstep.start and run.mesh(model=N)",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm under torchrun, or a norm that needs no other ranks",
    "join": (
        "give each rank the same number of batches: hvd.elastic.ElasticSampler and torch's DistributedSampler do that"
    ),
    "sparse_allreduce_async": "make the tensor dense, or use DistributedOptimizer(sparse_as_dense=True)",
    "start_timeline": "use `everstep profile JOB`, which writes a trace of each rank",
}
INSTEAD |= {
    "add_process_set": INSTEAD["ProcessSet"],
    "remove_process_set": INSTEAD["ProcessSet"],
    "stop_timeline": INSTEAD["start_timeline"],
}


def refusal(name: str) -> LoopError:
    """The error for a name of Horovod that is not here."""
    return LoopError(f"hvd.{name} is not in everstep_horovod: {INSTEAD[name]}")
