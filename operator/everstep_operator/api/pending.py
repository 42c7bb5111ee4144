"""What the schema has and this version does not do yet: refused with its name, never ignored.

Both the CRD and the parser read this list, so a job that reaches the operator past an older CRD is refused as well.
Work that implements a field deletes its entry here and nothing else. Invariant: the defaults of `types` pass.
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
    """The first entry that this spec asks for, if any."""
    return next((check for check in PENDING if check.holds is not None and not check.holds(spec)), None)
