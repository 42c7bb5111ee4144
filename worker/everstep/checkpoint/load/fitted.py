"""What fitting a commit into a state has found: what goes where, what is left out, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.load.selection import LoadReport, Selection
from everstep.checkpoint.state.modules import Answer, is_free
from everstep.checkpoint.state.tree import join

NAMED: Final = 5  # how many that do not fit an error names

LACKING: Final = "is in the state passed and not in the commit"
BEYOND: Final = "is in the commit and not in the state passed"
# A commit does not say whether a buffer was None when its run began: a None may as well be a setting of the module, as
# it is of BatchNorm with track_running_stats=False. A session knows.
UNSET: Final = " (the buffer is None here: make it before restore(), by a forward pass, or restore in a session)"

Body = dict[str, Any]


@dataclass(slots=True)
class Fit:
    """`bodies`: what goes into each key of the state, as `state.apply` takes it. `live`: for each of the commit's
    tensors, the names in `Captured.tensors` of those that it is put into. `judges`: for each module that is filled in
    part, the names that it judges by itself (`modules.is_free`)."""

    bodies: dict[str, Body] = field(default_factory=dict)
    live: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    judges: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def report(self) -> LoadReport:
        return LoadReport(tuple(self.missing), tuple(self.not_taken), tuple(self.mismatched))

    def judged(self, answers: Mapping[str, Answer], selection: Selection) -> None:
        """Add what modules said while they loaded (see `state.apply`) to the report. Raises `StateMismatch` for it if
        what is taken must fit: only then is it known, so that the state is changed."""
        problems: list[str] = []
        for key, answer in answers.items():
            own = self.judges.get(key, ())
            lacking = [join(key, name) for name in answer.missing if is_free(name, own)]
            lacking = [path for path in lacking if selection.takes(path)]
            beyond = [join(key, name) for name in answer.unexpected if is_free(name, own)]
            problems += [f"{path} {LACKING}" for path in lacking] + [f"{path} {BEYOND}" for path in beyond]
            self.missing += lacking
            self.not_taken += beyond
        if problems and selection.strict:
            more = f"; and {len(problems) - NAMED} more" * (len(problems) > NAMED)
            raise StateMismatch(
                f"{'; '.join(problems[:NAMED])}{more}. The module reads such names by itself, so this is known only "
                "after it was filled with the rest: do not train on. strict=False leaves them and reports them, and "
                "exclude= leaves them out"
            )
