"""Which EVERSTEP_* variables there are. One that nobody reads is a mistake in writing, and is named.

Pure. Invariant: the values of variables are never looked at; they may hold secrets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from everstep.contract import env

PREFIX = "EVERSTEP_"
# What Kubernetes sets in each container of a namespace that has a Service of a name like "everstep" or "everstep-x".
_SERVICE_LINK = re.compile(
    r"EVERSTEP(_[A-Z0-9_]+)?_(SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
# By name the default, empty for none, and the meaning, as the reference page shows them. Whoever starts a script sets
# these.
SET_BY_USERS: dict[str, tuple[str, str]] = {
    env.BACKEND: (
        "by the device",
        "The backend of torch.distributed, in torch's own syntax (`gloo`, `cpu:gloo,cuda:nccl`): "
        "[backends](../how-to-backends.md).",
    ),
    "EVERSTEP_PRELOAD": (
        "`torch,torch.distributed,torch._dynamo`, and slow libraries that the script imports",
        "Modules that the fork server imports once: "
        "[preloading](everstep-run.md#settings-that-torchrun-has-no-flag-for). One that starts threads or uses a GPU "
        "when it is imported is named, and imported in each process instead.",
    ),
    env.RECOVERY_SECONDS: (
        "300",
        "A process that has not come into an announced round by then is replaced. Those that have come, and wait for "
        "it, keep their memory.",
    ),
    env.HANG_SECONDS: (
        "60",
        "Seconds without progress after which a process of the session hangs, or waits for one that does. 0: never.",
    ),
    env.HANG_FACTOR: (
        "10",
        "A process must also have made no progress for this many times its slowest step. 0: only the seconds count.",
    ),
    env.MAX_RESTARTS: ("", "In place of `PET_MAX_RESTARTS`, which is meant for torchrun."),
    "EVERSTEP_LOG_LEVEL": ("`INFO`", "The lowest level of the agent's own lines, and of the operator's."),
    env.STRICT: (
        "`0`",
        "`1` refuses names that a loop carries and that are "
        "[not tracked](session-tracking.md#what-the-loop-carries), as `start(strict=True)` does.",
    ),
    env.DEBUG: (
        "",
        "`info` sets `TORCH_DISTRIBUTED_DEBUG`, `TORCH_CPP_LOG_LEVEL` and `NCCL_DEBUG` to `INFO` for the training "
        "processes. `detail` sets `TORCH_DISTRIBUTED_DEBUG=DETAIL` and `TORCH_SHOW_CPP_STACKTRACES=1` too. With "
        "either, refusals keep their traceback. A variable that the job sets itself stays. It costs time: take it out "
        "again.",
    ),
    env.HOROVOD_ELASTIC: (
        "by its text",
        "`1`: a Horovod script uses `hvd.elastic.run`; `0`: it does not ([Horovod](horovod.md)).",
    ),
    "EVERSTEP_CHECKPOINT_MAX_LOADS": (
        "3",
        "How often a commit is loaded without a newer one before it counts as [poison](checkpoint.md); 0: never.",
    ),
    "EVERSTEP_CHECKPOINT_NONFINITE": (
        "`refuse`",
        "What happens to a state with NaN or infinity: [checkpoint](checkpoint.md).",
    ),
    "EVERSTEP_SINGLE_COMMITTER": (
        "`0`",
        "`1`: accept a store without conditional create, as `single_committer=True` does ([storage](storage.md)).",
    ),
}
# By name the meaning. The operator sets these in the container `worker` of a pod.
SET_BY_OPERATOR: dict[str, str] = {
    env.JOB_NAME: "The TrainingJob to which the pod belongs.",
    env.JOB_NAMESPACE: "Its namespace.",
    env.JOB_UID: "Its UID.",
    env.JOB_CREATED: "When it was created, in seconds since 1970: of two jobs with one checkpoint URL, the newer one "
    "owns the log.",
    env.POD_NAME: "The pod.",
    env.NODE_NAME: "The node on which the pod runs.",
    env.WORKER_INDEX: "Which worker the pod is, from 0.",
    env.INCARNATION: "How many pods this worker had before.",
    env.ROUND: "Under `c10d`: the round of the pod. Under `everstep-run` the agent sets it for its processes, in each "
    "round anew.",
    env.CHECKPOINT_URL: "`spec.checkpoint.url`; this and the next six are defaults of "
    "[the Checkpointer](checkpoint.md#settings).",
    env.CHECKPOINT_KEEP: "`spec.checkpoint.keep`.",
    env.CHECKPOINT_KEEP_EVERY_STEPS: "`spec.checkpoint.keepEverySteps`.",
    env.CHECKPOINT_KEEP_EVERY_HOURS: "`spec.checkpoint.keepEveryHours`.",
    env.CHECKPOINT_EVERY_SECONDS: "`spec.checkpoint.everySeconds`.",
    env.CHECKPOINT_EVERY_STEPS: "`spec.checkpoint.everySteps`.",
    env.CHECKPOINT_ON_PREEMPTION: "1: `spec.checkpoint.onPreemption`.",
    env.REPORT_URL: "Where progress reports go.",
    env.TOKEN_FILE: "The file with the pod's token for them.",
    env.CA_CERTIFICATES: "With [TLS](../how-to-install.md#tls): PEM of the authorities by which the operator's "
    "certificate is verified.",
    env.JOINED_FILE: "With `c10d` and `etcd`: the file that `everstep-run` writes for the start-up probe when it is in "
    "a round.",
    env.GRACE_SECONDS: "Seconds from SIGTERM to SIGKILL.",
}
# No interface: an agent sets them for its processes, and local mode for the processes of a pod.
INTERNAL = (
    env.AGENT_SOCKET,
    env.RENDEZVOUS,
    env.LAST_RANK,
    env.LEAST_PROCESSES,
    env.MOST_PROCESSES,
    env.CALLS_FILE,
    env.CHECKPOINT_DEFAULT,
    env.TERMINATION_LOG,
    "EVERSTEP_LOCAL_POD",
)
KNOWN = frozenset({*SET_BY_USERS, *SET_BY_OPERATOR, *INTERNAL})


def unknown(environ: Mapping[str, str], known: Iterable[str] = KNOWN) -> list[str]:
    """One sentence for each variable that begins with EVERSTEP_ and is not `known`, with the nearest one that is."""
    names = {name.removeprefix(PREFIX) for name in known}
    sentences = []
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in names or _SERVICE_LINK.fullmatch(name):
            continue
        near = difflib.get_close_matches(rest, sorted(names), n=1)
        meant = f"; is {PREFIX}{near[0]} meant?" if near else ""
        sentences.append(f"{name}: no such variable, so it changes nothing{meant}")
    return sentences
