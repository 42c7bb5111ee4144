"""The `torchrun.handlers` entry points: `--rdzv-backend=everstep` and `=etcd-v3`.

torch loads this module in every process that imports torch.distributed.elastic, whatever backend is used. So it imports
nothing until a handler is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def everstep() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: gives what makes the handler."""
    return partial(_create, "everstep")


def etcd_v3() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: gives what makes the handler."""
    return partial(_create, "etcd-v3")


def _create(backend: str, parameters: RendezvousParameters) -> RendezvousHandler:
    from everstep.membership.backends.opening import open_store  # noqa: PLC0415 - see above
    from everstep.membership.torchrun.handler import RoundHandler  # noqa: PLC0415 - see above

    store, settings = open_store(backend, parameters.endpoint, parameters.config, parameters.run_id)
    return RoundHandler(backend, parameters, store, settings)
