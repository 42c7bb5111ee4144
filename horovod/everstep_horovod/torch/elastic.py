"""`hvd.elastic`: training that goes on when the world changes."""

from __future__ import annotations

from everstep_horovod.sampler import ElasticSampler
from everstep_horovod.state import TorchState
from everstep_horovod.training import run

__all__ = ["ElasticSampler", "TorchState", "run"]
