"""Time limits for `everstep-run`, in addition to torchrun's flags.

Invariant: each is only a default, which the template's own environment overrides.
"""

from __future__ import annotations

from typing import assert_never

from everstep.contract import env
from everstep_operator.api.recovery import Hang, HangMode
from everstep_operator.api.types import TrainingJobSpec


def tuning(spec: TrainingJobSpec) -> dict[str, str]:
    """Variables of the worker container, if agents form the rounds."""
    return {
        **_hang(spec.recovery.hang),
        env.RECOVERY_SECONDS: str(spec.rendezvous.join_timeout_seconds),
        # A failure of the program ends the pod: rules, budget and back-off are the operator's task, and so is the
        # choice of another node. The agent itself restarts processes that were killed from outside or lost a peer.
        env.MAX_RESTARTS: "0",
    }


def _hang(hang: Hang) -> dict[str, str]:
    match hang.mode:
        case HangMode.AUTO:
            return {env.HANG_SECONDS: str(hang.floor_seconds)}
        case HangMode.FIXED:
            return {env.HANG_SECONDS: str(hang.timeout_seconds), env.HANG_FACTOR: "0"}
        case HangMode.OFF:
            return {env.HANG_SECONDS: "0"}
        case other:
            assert_never(other)
