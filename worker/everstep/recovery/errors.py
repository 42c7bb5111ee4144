"""What a script has done that cannot be right."""

from __future__ import annotations


class LoopError(RuntimeError):
    """The training loop uses the session in a way that cannot be right; the text says what to write instead.

    `everstep_refused_after`: steps that the process had completed. An agent reads it in the process's error file.
    """

    steps_done = 0  # in this process: an error may be made where no run is known

    def __init__(self, *words: object) -> None:
        super().__init__(*words)
        self.everstep_refused_after = LoopError.steps_done
