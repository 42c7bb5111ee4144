"""The round stores by the name of their backend, as `--rdzv-backend` says it. Knows no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from everstep.rendezvous.configuration import (
    Configuration,
    ConfigurationInvalid,
    etcd_gateway,
    operator_calls,
    read,
    read_operator,
)
from everstep.rendezvous.etcd import EtcdStore
from everstep.rendezvous.http import HttpStore
from everstep.rendezvous.store import RoundStore

EVERSTEP = "everstep"
ETCD_V3 = "etcd-v3"


def open_store(backend: str, endpoint: str, config: Mapping[str, Any], run_id: str) -> tuple[RoundStore, Configuration]:
    """The store of one job, and the settings of its rendezvous. Raises ConfigurationInvalid, StoreRefused."""
    if backend == ETCD_V3:
        settings = read(config, endpoint)
        return EtcdStore(etcd_gateway(settings), run_id, settings.prefix), settings
    if backend == EVERSTEP:
        # The job is the one of the pod's token, whatever the run id.
        settings = read_operator(config, endpoint, os.environ)
        return HttpStore(operator_calls(settings)), settings
    raise ConfigurationInvalid(f"--rdzv-backend={backend}: no such backend; there are {EVERSTEP} and {ETCD_V3}")
