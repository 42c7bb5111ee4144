"""The error for a training script that uses the session wrongly."""

from __future__ import annotations


class LoopError(RuntimeError):
    """The training loop uses the session wrongly; the message says what to write instead.

    `everstep_refused_after`: how many steps the process had completed. An agent reads it in the process's error file.
    """

    steps_done = 0  # of this process; a class attribute, because an error may be raised where no run is known

    def __init__(self, *words: object) -> None:
        super().__init__(*words)
        self.everstep_refused_after = LoopError.steps_done
