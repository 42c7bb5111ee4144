"""`hvd.elastic`: training that goes on when the world changes."""

from __future__ import annotations

from everstep.compat.horovod.sampler import ElasticSampler
from everstep.compat.horovod.state import TorchState
from everstep.compat.horovod.training import run

__all__ = ["ElasticSampler", "TorchState", "run"]
