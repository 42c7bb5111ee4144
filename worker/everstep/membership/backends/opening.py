"""Opens the round store that `--rdzv-backend` names. Knows nothing of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from everstep.membership.backends.configuration import (
    Configuration,
    ConfigurationInvalid,
    etcd_gateway,
    operator_calls,
    read,
    read_operator,
)
from everstep.membership.backends.etcd import EtcdStore
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.store import RoundStore

EVERSTEP = "everstep"
ETCD_V3 = "etcd-v3"


def remedy(backend: str, run_id: str) -> str:
    """What the user can do if a job's rounds were over before an agent was in any."""
    if backend == EVERSTEP:
        return "nothing was trained here: the rounds of this TrainingJob are over; create another one"
    default = " (none is the default)" if run_id == "none" else ""
    return f"nothing was trained here: an earlier run used --rdzv-id={run_id}{default}; give each run an id of its own"


def open_store(backend: str, endpoint: str, config: Mapping[str, Any], run_id: str) -> tuple[RoundStore, Configuration]:
    """The store of one job, and the settings of its rendezvous. Raises ConfigurationInvalid, StoreRefused."""
    if backend == ETCD_V3:
        if not run_id:
            raise ConfigurationInvalid("--rdzv-id is empty: give the run a name, the same for all its agents")
        settings = read(config, endpoint)
        return EtcdStore(etcd_gateway(settings), run_id, settings.prefix), settings
    if backend == EVERSTEP:
        # The pod's token names the job, so the run id does not matter.
        settings = read_operator(config, endpoint, os.environ)
        return HttpStore(operator_calls(settings)), settings
    raise ConfigurationInvalid(f"--rdzv-backend={backend}: no such backend; there are {EVERSTEP} and {ETCD_V3}")
