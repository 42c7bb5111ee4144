"""Makes torchrun's settings for a job's rendezvous, by backend.

torchrun reads each of its flags from PET_<FLAG>, so the user's command line stays as it is. Invariant: in an elastic
job whose agents form the rounds nothing here depends on `replicas`, so pods made before and after a resize ask for the
same.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.contract import labels
from everstep_operator import object_names
from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan.snapshot import JobView, Settings
from everstep_operator.plan.state import sizing

# Stock c10d waits 30 s for late joiners and needs 15 s to notice a dead agent; a world of fixed size knows its members.
_RENDEZVOUS_TUNING = {
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "heartbeat_timeout": 3,
    "close_timeout": 5,
}


FEW = 3
# The directory where a worker finds the Secret of etcd.
ETCD_DIR = "/var/run/secrets/everstep-etcd"
# The name under which each backend is registered with torchrun.
_HANDLERS = {RendezvousBackend.EVERSTEP: "everstep", RendezvousBackend.ETCD: "etcd-v3"}


def restarts_in_place(job: JobView) -> int:
    """How often torchrun may start its processes again before its pod fails.

    With c10d never: so the operator decides, and charges each failure once, to its cause (ADR 0027). With the other
    backends a few times: torchrun counts a lost peer as a failure too, and without restarts each loss would end all
    pods. Such restarts are neither charged nor judged. (`everstep-run` distinguishes failures from lost peers, and has
    a number of its own: `agent_limits`.)
    """
    return 0 if job.spec.rendezvous.backend is RendezvousBackend.C10D else min(FEW, job.spec.recovery.max_restarts)


def of_round(job: JobView, index: int, round_: int, size: int) -> dict[str, str]:
    """Settings for c10d. The store is on worker 0 and dies with its round, so the run id contains the round's
    number."""
    # Worker 0 reaches its own store without waiting for its DNS record.
    host = "localhost" if index == 0 else object_names.rendezvous_host(job.name, job.namespace, round_)
    conf = {
        "is_host": int(index == 0),
        "join_timeout": job.spec.rendezvous.join_timeout_seconds,
        "read_timeout": job.spec.rendezvous.join_timeout_seconds,
        **_RENDEZVOUS_TUNING,
    }
    return {
        "PET_NNODES": str(size),
        "PET_NPROC_PER_NODE": str(job.spec.processes()),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{host}:{labels.RENDEZVOUS_PORT}",
        "PET_RDZV_ID": f"{job.uid}-{round_}",
        "PET_RDZV_CONF": _conf(conf),
        # With a shared store, half of the hard kills left a job that never recovered (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def of_agents(job: JobView, settings: Settings) -> dict[str, str]:
    """Settings for everstep and etcd. The agents agree on rounds in a store outside the workers, under one run id for
    the whole job. In etcd a rerun has one of its own: nobody can begin the document of the earlier run anew there."""
    chosen = job.spec.rendezvous
    sizes = sizing.bounds(job.spec)
    conf: dict[str, str | int] = {"timeout": chosen.join_timeout_seconds}
    if sizes.allowed:
        conf["allowed"] = ":".join(map(str, sizes.allowed))
    if job.spec.elastic is not None and job.spec.elastic.shrink_after_seconds > 0:
        conf["shrink_after"] = job.spec.elastic.shrink_after_seconds
        # The wait for a replacement does not count as lateness.
        conf["timeout"] = chosen.join_timeout_seconds + job.spec.elastic.shrink_after_seconds
    endpoint = settings.report_url.rstrip("/")
    if chosen.etcd is not None:
        endpoint, conf["prefix"] = ",".join(chosen.etcd.endpoints), chosen.etcd.prefix
        if chosen.etcd.secret_ref is not None:
            conf["secret_dir"] = ETCD_DIR
    return {
        "PET_NNODES": f"{sizes.minimum}:{sizes.maximum}",
        "PET_NPROC_PER_NODE": str(job.spec.processes()),
        "PET_RDZV_BACKEND": _HANDLERS[chosen.backend],
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ID": f"{job.uid}-{job.rerun}" if job.rerun and chosen.etcd is not None else job.uid,
        "PET_RDZV_CONF": _conf(conf),
    }


def _conf(settings: Mapping[str, str | int]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(settings.items()))
