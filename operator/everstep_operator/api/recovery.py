"""`spec.recovery`: what happens after a loss, and when a silent process counts as lost.

It is a part of `types`, with the same rules: it does not know what a field does, and everything has an upper bound.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from everstep_operator.api.base import ApiModel, Check, Int32, section
from everstep_operator.api.conditions import Cause

YEAR = 365 * 24 * 3600


class HangMode(StrEnum):
    """How a hang is found. Write "Off" in quotes: bare Off is a boolean in YAML."""

    AUTO = "Auto"
    FIXED = "Fixed"
    OFF = "Off"


class RuleAction(StrEnum):
    """What a recovery rule does about a loss that it matches."""

    FAIL = "Fail"
    RESTART = "Restart"
    RESTART_UNCHARGED = "RestartUncharged"


class Backoff(ApiModel):
    """Waits between charged restarts: `initial` doubled at each, up to `max`."""

    initial: Annotated[Int32, Field(ge=0, le=3_600)] = Field(
        default=1, description="Seconds before the first charged restart."
    )
    max: Annotated[Int32, Field(ge=0, le=86_400)] = Field(default=300, description="Longest wait in seconds.")

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="self.initial <= self.max",
            message="spec.recovery.backoffSeconds.initial must not be greater than max",
            field=".initial",
            holds=lambda b: b.initial <= b.max,
        ),
    )

    def after(self, failures: int) -> timedelta:
        """The wait behind so many failures in a row, 1 or more."""
        return timedelta(seconds=min(self.max, self.initial * 2 ** min(failures - 1, 30)))


class Hang(ApiModel):
    """When a training process that stays in one step counts as hung. It is replaced, while the others go on.
    `everstep-run` looks for hangs in processes that use the session. New values apply to workers that start after the
    change.
    """

    mode: HangMode = Field(
        default=HangMode.AUTO,
        description="Auto: after ten times its slowest recent step. Fixed: after timeoutSeconds. "
        '"Off" (in quotes: bare Off is a boolean in YAML). '
        "everstep-run looks for hangs in processes that use the session. With backend c10d hangs are not found.",
    )
    timeout_seconds: Annotated[Int32, Field(ge=1, le=86_400)] | None = Field(
        default=None, description="Seconds in one step, with mode Fixed."
    )
    floor_seconds: Annotated[Int32, Field(ge=1, le=86_400)] = Field(
        default=60, description="With mode Auto, never sooner than this many seconds."
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="(self.mode == 'Fixed') == has(self.timeoutSeconds)",
            message="spec.recovery.hang.timeoutSeconds must be given with mode Fixed, and only with it",
            field=".timeoutSeconds",
            holds=lambda h: (h.mode == HangMode.FIXED) == (h.timeout_seconds is not None),
        ),
    )


class Rule(ApiModel):
    """What to do about a loss with one of these exit codes or reasons."""

    on_exit_codes: tuple[Annotated[Int32, Field(ge=1, le=255)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="Exit codes of the worker container; 0 is never a failure.",
    )
    on_reasons: tuple[Cause, ...] | None = Field(
        default=None, min_length=1, max_length=32, description="Causes, as in status.recoveries."
    )
    action: RuleAction = Field(
        description="Fail: end the job. Restart: charge the restart budget. RestartUncharged: restart without a charge."
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="has(self.onExitCodes) != has(self.onReasons)",
            message="spec.recovery.rules: a rule has either onExitCodes or onReasons; make two rules of it",
            holds=lambda r: (r.on_exit_codes is None) != (r.on_reasons is None),
        ),
    )


MAX_NODE_GRACE = 86_400


class Recovery(ApiModel):
    """How often, how soon and after which losses the job restarts."""

    max_restarts: Annotated[Int32, Field(ge=0, le=10_000)] = Field(
        default=10, description="Charged restarts within the window; only failures of the program are charged."
    )
    restart_window_seconds: Annotated[Int32, Field(ge=1, le=YEAR)] = Field(
        default=3_600, description="Seconds after which the charged restarts are forgotten."
    )
    backoff_seconds: Backoff = section(Backoff, "Waits between charged restarts.")
    no_progress_limit: Annotated[Int32, Field(ge=1, le=1_000)] = Field(
        default=3,
        description="The job fails after so many restarts in a row without one new step. It also fails after so many "
        "failed starts of a program that has never run.",
    )
    node_grace_seconds: Annotated[Int32, Field(ge=0, le=MAX_NODE_GRACE)] | None = Field(
        default=None,
        description="Seconds for which a worker is left on a node that is not Ready. Absent: tolerationSeconds of "
        "the template's own toleration of node.kubernetes.io/not-ready, or of node.kubernetes.io/unreachable where the "
        "node is silent; else 60 while the kubelet says that the node is not ready, and 0 when it is silent, because "
        "Kubernetes has waited by then. A node that is deleted is lost at once. A worker whose agent still answers the "
        "operator is never lost by the state of its node; Kubernetes itself evicts it when its pod's tolerationSeconds "
        "(300 by default) are over.",
    )
    start_timeout_seconds: Annotated[Int32, Field(ge=10, le=YEAR)] | None = Field(
        default=None,
        description="Seconds from the creation of a worker's pod, or from status.refusedSince if it has none, until "
        "its container runs. A worker that has not started by then, whatever it waits for (quota, capacity, an image, "
        "a volume, an init container), is replaced (StartTimeout), on another node where there is one, and uncharged. "
        "After noProgressLimit of them in a row, while too few workers train, the job fails. To end it at the first "
        "one, add a rule for StartTimeout. Absent: no deadline.",
    )
    hang: Hang = section(Hang, "When a silent process counts as hung.")
    rules: tuple[Rule, ...] = Field(default=(), max_length=32, description="The first matching rule decides.")
