"""The error for a training script that uses the session wrongly."""

from __future__ import annotations

from everstep.contract.refusal import Refusal


class LoopError(Refusal, RuntimeError):
    """The training loop uses the session wrongly; the message says what to write instead.

    `certain`: whether the same script would be refused again. A peer that does not come in time may have left the loop,
    or its disk may be slow. Such an error is no refusal for a launcher, which restarts the script as after any other
    failure of the program.
    `everstep_brief`: a text for a TrainingJob's status, if it has no room for the whole one.
    """

    def __init__(self, *words: object, certain: bool = True, brief: str = "") -> None:
        super().__init__(*words)
        self.everstep_brief = brief
        self.certain = certain
        if not certain:
            self.may_pass()
