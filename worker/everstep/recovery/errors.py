"""The error for a training script that uses the session wrongly."""

from __future__ import annotations


class LoopError(RuntimeError):
    """The training loop uses the session wrongly; the message says what to write instead.

    `everstep_refused_after`: how many steps the process had completed. An agent reads it in the process's error file.
    `certain`: whether the same script would be refused again. A peer that does not come in time may have left the loop,
    or its disk may be slow. Such an error has no `everstep_refused_after`, so launchers restart the script as after any
    other failure of the program.
    `everstep_brief`: a text for a TrainingJob's status, if it has no room for the whole one.
    """

    steps_done = 0  # of this process; a class attribute, because an error may be raised where no run is known

    def __init__(self, *words: object, certain: bool = True, brief: str = "") -> None:
        super().__init__(*words)
        self.everstep_brief = brief
        self.certain = certain
        self.everstep_refused_after = LoopError.steps_done if certain else None
