"""Fields of the schema that this version does not implement yet. A job that uses one is refused with its name, and
never ignored.

Both the CRD and the parser read this list, so a job that an older CRD accepted is refused too. To enable a field that
is implemented, delete its entry here. Invariant: the defaults of `types` pass.
"""

from __future__ import annotations

from everstep_operator.api.base import Check
from everstep_operator.api.types import TrainingJobSpec


def _not_yet(what: str, remedy: str) -> str:
    return f"{what} is not implemented in this version; {remedy}"


# `self` and the argument of `holds` are the spec.
PENDING: tuple[Check, ...] = (
    Check(
        cel="!has(self.checkpoint) || !self.checkpoint.onPreemption",
        message=_not_yet("spec.checkpoint.onPreemption: true", "remove it"),
        field=".checkpoint.onPreemption",
        holds=lambda s: s.checkpoint is None or not s.checkpoint.on_preemption,
    ),
)


def refusal(spec: TrainingJobSpec) -> Check | None:
    """The first entry that this spec uses, if any."""
    return next((check for check in PENDING if check.holds is not None and not check.holds(spec)), None)
