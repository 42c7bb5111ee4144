"""What torchrun finds in the `torchrun.handlers` entry points: `--rdzv-backend=etcd-v3`.

torch loads this module in every process that imports torch.distributed.elastic, whatever backend is used: so nothing is
imported until a handler is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

ETCD_V3 = "etcd-v3"


def etcd_v3() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: gives what makes the handler."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        from everstep.rendezvous.configuration import etcd_gateway, read  # noqa: PLC0415 - see above
        from everstep.rendezvous.etcd import EtcdStore  # noqa: PLC0415 - see above
        from everstep.rendezvous.torchrun import RoundHandler  # noqa: PLC0415 - see above

        settings = read(parameters.config, parameters.endpoint)
        store = EtcdStore(etcd_gateway(settings), parameters.run_id, settings.prefix)
        return RoundHandler(ETCD_V3, parameters, store, settings)

    return create
