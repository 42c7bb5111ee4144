"""Environment variables that the operator sets in the worker container and the worker library reads."""

import math
from collections.abc import Mapping

JOB_NAME = "EVERSTEP_JOB_NAME"
JOB_NAMESPACE = "EVERSTEP_JOB_NAMESPACE"
JOB_UID = "EVERSTEP_JOB_UID"
# The job's creationTimestamp in whole seconds since the epoch: of two jobs that share a URL, the newer owns the log.
JOB_CREATED = "EVERSTEP_JOB_CREATED"
WORKER_INDEX = "EVERSTEP_WORKER_INDEX"
INCARNATION = "EVERSTEP_INCARNATION"
# The round that this process is in: the fencing token of its commits.
ROUND = "EVERSTEP_ROUND"
# Which rendezvous counts those rounds, where no operator does; a store that lost its content begins another.
RENDEZVOUS = "EVERSTEP_RENDEZVOUS"
POD_NAME = "EVERSTEP_POD_NAME"
NODE_NAME = "EVERSTEP_NODE_NAME"

CHECKPOINT_URL = "EVERSTEP_CHECKPOINT_URL"
# 1: nobody chose that URL, so a script that names another one ignores no wish.
CHECKPOINT_DEFAULT = "EVERSTEP_CHECKPOINT_DEFAULT"
CHECKPOINT_KEEP = "EVERSTEP_CHECKPOINT_KEEP"
# Commits that stay for good: the first of each interval of so many steps, or hours.
CHECKPOINT_KEEP_EVERY_STEPS = "EVERSTEP_CHECKPOINT_KEEP_EVERY_STEPS"
CHECKPOINT_KEEP_EVERY_HOURS = "EVERSTEP_CHECKPOINT_KEEP_EVERY_HOURS"
CHECKPOINT_EVERY_SECONDS = "EVERSTEP_CHECKPOINT_EVERY_SECONDS"
CHECKPOINT_EVERY_STEPS = "EVERSTEP_CHECKPOINT_EVERY_STEPS"
CHECKPOINT_ON_PREEMPTION = "EVERSTEP_CHECKPOINT_ON_PREEMPTION"  # 1: see `Checkpointer`

# Where progress reports go, and the file that holds this pod's token for them.
REPORT_URL = "EVERSTEP_REPORT_URL"
TOKEN_FILE = "EVERSTEP_TOKEN_FILE"
# PEM of the authorities by which its certificate is verified; without it those of the image are taken.
CA_CERTIFICATES = "EVERSTEP_CA_CERTIFICATES"

# Where the container's termination message goes, if not to /dev/termination-log (local mode).
TERMINATION_LOG = "EVERSTEP_TERMINATION_LOG"

# The file that an agent writes when it is in a round, for the start-up probe of its pod.
JOINED_FILE = "EVERSTEP_JOINED_FILE"

# Seconds from SIGTERM to SIGKILL that a training process has.
GRACE_SECONDS = "EVERSTEP_GRACE_SECONDS"

# The Unix socket on which an agent tells its training processes of rounds.
AGENT_SOCKET = "EVERSTEP_AGENT_SOCKET"

# The backend of torch.distributed, in place of the one that the device decides.
BACKEND = "EVERSTEP_BACKEND"
# How much torch.distributed and NCCL print and check: "info" or "detail".
DEBUG = "EVERSTEP_DEBUG"

# Whether a session refuses what the loop carries from step to step and does not track: 0 or 1.
STRICT = "EVERSTEP_STRICT"

# Whether a Horovod script uses hvd.elastic.run, in place of what its text says: 0 or 1.
HOROVOD_ELASTIC = "EVERSTEP_HOROVOD_ELASTIC"

# How many training processes the job may come to have; the agent tells the session.
LEAST_PROCESSES = "EVERSTEP_LEAST_PROCESSES"
MOST_PROCESSES = "EVERSTEP_MOST_PROCESSES"

# Seconds for which a process may be in one step, at least, before it counts as hung; 0: never.
HANG_SECONDS = "EVERSTEP_HANG_SECONDS"
# And so many times its slowest recent step; 0: however slow its steps are.
HANG_FACTOR = "EVERSTEP_HANG_FACTOR"
# Failures of the program that `everstep-run` mends itself. In place of PET_MAX_RESTARTS, which is meant for torchrun,
# to whom a lost peer is a failure like any other.
MAX_RESTARTS = "EVERSTEP_MAX_RESTARTS"
# Seconds that a process may take to come into an announced round before it is replaced.
RECOVERY_SECONDS = "EVERSTEP_RECOVERY_SECONDS"

# The rank that a new process's place had in the agent's newest round, for what a script builds before it has one.
LAST_RANK = "EVERSTEP_LAST_RANK"

# A file in which a training process keeps the names of its newest collectives, for when it cannot be asked any more.
CALLS_FILE = "EVERSTEP_CALLS_FILE"

_GRACE = 30.0  # seconds; the default of Kubernetes and of torchrun


class BadVariable(ValueError):
    """An environment variable is not what it has to be. The text names it, its value and the form that is expected."""


def number(
    environ: Mapping[str, str], name: str, *, low: float = 0.0, high: float = 1e9, whole: bool = False
) -> float | None:
    """The variable's number, or None if it is not set or empty. Raises `BadVariable`."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or (whole and not value.is_integer()):
        form = "a whole number" if whole else "a number"
        raise BadVariable(f"{name}={text[:60]!r}: {form} from {low:.15g} to {high:.15g} is expected")
    return value


def whole_number(
    environ: Mapping[str, str], name: str, default: int, *, low: int = 0, high: int = 10**15
) -> int:  # as many as a float tells apart
    """The variable's whole number, or the default if it is not set or empty. Raises `BadVariable`."""
    value = number(environ, name, low=low, high=high, whole=True)
    return default if value is None else int(value)


def grace_seconds(environ: Mapping[str, str]) -> float:
    """Seconds between SIGTERM and SIGKILL, as the operator has set them, or 30. Raises `BadVariable`."""
    return max(1.0, number(environ, GRACE_SECONDS) or _GRACE)


def rank_if_all_are_there(environ: Mapping[str, str], processes: int, slot: int) -> int:
    """The rank of this worker's process number `slot` in a world of all workers, of so many `processes` each. Raises
    `BadVariable`."""
    return whole_number(environ, WORKER_INDEX, 0) * processes + slot
