"""Describes the calls of a script before its first step, in the form in which ranks compare them (`same_calls`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from everstep.contract.refusal import OWN_MODULES
from everstep.recovery.forming.same_calls import AT_PLACE
from everstep.recovery.state.model_parts import is_of_place
from everstep.recovery.state.randomness import STATE, Randomness
from everstep.recovery.state.shape import MODEL, Shape

MOST = 300  # characters of one call


def call(words: str, frame: FrameType | None) -> str:
    """The call in one line of text, with the script's line, which is found from `frame` upwards."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith((*OWN_MODULES, "contextlib")):
        frame = frame.f_back
    at = f" ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})" if frame is not None else ""
    return " ".join(words.split())[:MOST] + at


def name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def loop(loader: Any, until: int | None, epochs: int | None, *, nested: bool) -> str:
    """The text for the loop over all steps. `nested`: it is over epochs, and contains the steps of each."""
    data = "no loader" if loader is None else "a loader"
    return f"run.{'epochs' if nested else 'steps'}({data}, until={until}, epochs={epochs})"


def of_state(state: Mapping[str, Any], shape: Shape, mesh: Any) -> Iterable[str]:
    """The text for the tracked names. Each place of a replica may track modules and other torch objects under its own
    names."""
    size = shape.model_size
    seeds = state.get(STATE)
    names = {*state, *(seeds.generators if isinstance(seeds, Randomness) else ())}
    own = {key for key, target in state.items() if size > 1 and is_of_place(target)}
    yield f"run.track({', '.join(sorted(names - own))})"
    if size > 1:
        yield f"{AT_PLACE.format(mesh.get_local_rank(MODEL))}run.track({', '.join(sorted(own))})"
