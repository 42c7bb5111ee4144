"""The round stores by the name of their backend, as `--rdzv-backend` says it. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.rendezvous.configuration import Configuration, ConfigurationInvalid, etcd_gateway, read
from everstep.rendezvous.etcd import EtcdStore
from everstep.rendezvous.store import RoundStore

ETCD_V3 = "etcd-v3"


def open_store(backend: str, endpoint: str, config: Mapping[str, Any], run_id: str) -> tuple[RoundStore, Configuration]:
    """The store of one job, and the settings of its rendezvous. Raises ConfigurationInvalid, StoreRefused."""
    if backend == ETCD_V3:
        settings = read(config, endpoint)
        return EtcdStore(etcd_gateway(settings), run_id, settings.prefix), settings
    raise ConfigurationInvalid(f"--rdzv-backend={backend}: no such backend; there is {ETCD_V3}")
