"""Texts for wrong calls of the session by a script: each says what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch.utils.data import Dataset

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_objects import variables, walk
from everstep.train.guards.untracked.covered import word


def unnamed(objects: Iterable[Any], named: Mapping[str, Any], frame: FrameType) -> str:
    """The text for `track(model, optimizer)`, called from `frame`."""
    written = dict[str, str]()
    names = {id(h.value): h.name for h in reversed(list(walk(variables(frame))))}
    for passed in objects:
        name = names.get(id(passed))
        key = word(name) if name is not None else type(passed).__name__.lower()
        while key in written or key in named:
            key += "_2"
        written[key] = name if name is not None else "…"
    call = ", ".join([f"{key}={name}" for key, name in written.items()] + [f"{name}={name}" for name in named])
    return (
        "track() takes each object with a name, under which it is saved and found again: write "
        f"`run.track({call})` before the loop"
    )


def no_loader(passed: Any, name: str) -> str:
    """The text for `steps(passed, …)`, or for one of several loaders, called `name`."""
    kind = type(passed).__qualname__
    text = f"steps(): loader{name} is of type {kind}"
    if isinstance(passed, range | int) and not name:
        return f"{text}: the number of steps is said as until=. Write `run.steps(until={_count(passed)})`"
    text += ", whose position cannot be saved"
    if isinstance(passed, Dataset):
        return f"{text}: write `loader = run.loader(dataset, global_batch=…)`, and pass that"
    if isinstance(passed, Iterator) or kind == "tqdm":
        text += (
            ", and which cannot be iterated again: pass the DataLoader itself. A progress bar goes around the "
            "loop, `for step in tqdm(run.steps(loader, epochs=3)):`. Or"
        )
    else:
        text += ":"
    return (
        f"{text} pass a torch.utils.data.DataLoader, or run.loader(dataset, global_batch=…); several as a tuple or a "
        "mapping, run.steps((a, b), …)"
    )


def _count(passed: range | int) -> int:
    return passed if isinstance(passed, int) else len(passed)


def tracked_late(objects: Mapping[str, Any]) -> str:
    """The text for `track` in the loop or after it."""
    call = ", ".join(f"{name}={name}" for name in objects)
    return (
        f"track() was called after the loop began: call it before the loop. The saved state was restored before that, "
        f"without {', '.join(objects)}. Write `run.track({call})`, and what makes it, before "
        "`for step in run.steps(…):`, run.epochs(…) or run.train(…)"
    )


def check_goal(loader: Any, until: int | None, epochs: int | None) -> None:
    """Raises `LoopError` for a loop that does not say how long it is."""
    if (until is None) == (epochs is None):
        both = "until= and epochs= both say" if until is not None else "nothing says"
        raise LoopError(
            f"run.steps(): {both} where the loop ends. Write `run.steps(loader, epochs=3)`, or "
            "`run.steps(loader, until=1000)`, which counts steps from the beginning of the run"
        )
    if until is None and loader is None:
        raise LoopError(
            "run.steps(epochs=…) without a loader, whose length is an epoch: write `run.steps(loader, epochs=3)`, "
            "or without data `run.steps(until=1000)`"
        )


def marked(name: str) -> str:
    """The text for a tracked object of which each rank holds another part."""
    return (
        f"track({name}=…): everstep.Union marks state of which each rank holds another part. In a run all replicas "
        "hold the same state, because a process that replaces a lost one gets it from another rank. Save experts or "
        "pipeline stages with everstep.Checkpointer, without a run"
    )
