"""Makes the probe by which a pod is Ready when its worker has joined a round, and not when its container runs.

With backend everstep the round store knows who is in a round. With c10d and etcd the operator does not learn it:
torchrun runs no code of ours, and its store ends with its round. But torchrun and everstep-run start the training
processes when the round is complete, and not before. torchrun's have `TORCHELASTIC_RUN_ID` in their environment from
their first moment. Those of everstep-run are forked, so its agent writes a file. A command in the container can see
both, and needs only the shell and `grep` of the image.

It is a start-up probe, which ends with its first success: later rounds cost nothing. One run of it waits until
then, because each failed run would be an event. Invariant: it never fails, because the kubelet would kill the container
then. Where nothing can be seen (no `grep`, another user's processes, a program without a launcher), it succeeds once a
rendezvous would have been given up: then the program runs without one.
"""

from __future__ import annotations

from typing import Any

from everstep.contract import env
from everstep_operator import object_names
from everstep_operator.api.types import RendezvousBackend, TrainingJobSpec

PROBES = ("startupProbe", "readinessProbe")
SHARED_MEMORY = "/dev/shm"  # noqa: S108  # of a container, which can write there, also below a read-only root
LOOKS_PER_SECOND = 2
SPARE_SECONDS = 60  # a loaded node counts slowly
NEVER = 2**31 - 1


def is_needed(spec: TrainingJobSpec, container: dict[str, Any]) -> bool:
    """Whether Ready would else mean that a container runs. A template's own probe says what its worker's readiness
    is."""
    return spec.rendezvous.backend is not RendezvousBackend.EVERSTEP and not any(container.get(p) for p in PROBES)


def joined_file(job: str, index: int, incarnation: int) -> str:
    """The file that an agent writes. Pods with the host's IPC share the folder."""
    return f"{SHARED_MEMORY}/everstep-joined-{object_names.pod_name(job, index, incarnation)}"


def probe(spec: TrainingJobSpec) -> dict[str, Any]:
    limit = spec.rendezvous.join_timeout_seconds
    script = (
        "command -v grep >/dev/null || exit 0; n=0; "
        f"while [ $n -lt {limit * LOOKS_PER_SECOND} ]; do "
        f'[ -e "${env.JOINED_FILE}" ] && exit 0; '
        "grep -qsz '^TORCHELASTIC_RUN_ID=' /proc/[0-9]*/environ && exit 0; "
        f"n=$((n+1)); sleep {1 / LOOKS_PER_SECOND:g} 2>/dev/null || sleep 1; "
        "done; exit 0"
    )
    # The count may take twice as long where `sleep` knows whole seconds alone.
    return {
        "exec": {"command": ["/bin/sh", "-c", script]},
        "timeoutSeconds": 2 * limit + SPARE_SECONDS,
        "periodSeconds": 1,
        "failureThreshold": NEVER,
    }
