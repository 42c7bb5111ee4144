"""Files of other libraries as sources of an import or a comparison: names, shapes and types first, bytes last.

Knows no file format: `source_files` and `source_dcp` open them. Invariant: what a commit cannot hold is refused here,
by name, before a byte of a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.state.tree import DTYPES, MAX_PATH, Flattener
from everstep.torch_private.optimizers import is_schedule_state

MODEL: Final = "model"


@dataclass(frozen=True, slots=True)
class Form:
    """The shape and type of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Source:
    """A state that can become a commit. `bodies`: the content of each key in a commit's `values`, with references to
    `tensors`. `read` returns tensors by name, in the requested order, a few at a time."""

    what: str
    bodies: Mapping[str, Json]
    tensors: Mapping[str, Form]
    read: Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]]

    @property
    def bytes(self) -> int:
        return sum(form.bytes for form in self.tensors.values())

    def counted(self, advance: Callable[[int], None]) -> Source:
        """The same, which says of each tensor that is read how many bytes it has."""

        def read(names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.read(names):
                advance(self.tensors[name].bytes)
                yield name, tensor

        return replace(self, read=read)


def of_state(what: str, state: Any, key: str, stateful: Iterable[str] = ()) -> Source:
    """A source of a state that is in memory, or mapped into it.

    A mapping of names to tensors is the state of one module, `key`; of any other mapping each key is one of the state.
    `stateful`: keys of objects that have `state_dict` and `load_state_dict`, beside optimizers and schedulers.
    Raises `StateMismatch` naming what no commit can hold.
    """
    if isinstance(state, torch.Tensor) or not isinstance(state, Mapping) or not state:
        raise StateMismatch(f"{what}: holds {_called(state)}; a dict of tensors, or of state_dicts, is expected")
    keys = {key: state} if _is_state_dict(state) else dict(state)
    flattener, kinds = Flattener(), frozenset(stateful)
    bodies: dict[str, Json] = {}
    for name, value in keys.items():
        check_key(what, name)
        kind, tree = _by_name(value, keys) or (_kind(name, value, kinds), value)
        try:
            bodies[name] = {"kind": kind, "tree": flattener.flatten(tree, name)}
        except StateMismatch as e:
            raise StateMismatch(f"{what}: {e}") from e
    if unknown := sorted(kinds - keys.keys()):
        raise StateMismatch(
            f"{what}: stateful={unknown[0]!r}: there is no such key; there are {', '.join(sorted(keys))}"
        )
    tensors = flattener.tensors
    forms = {name: Form(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    return checked(Source(what, bodies, forms, lambda names: ((n, tensors[n]) for n in names)))


def check_key(what: str, key: object) -> None:
    """Raises `StateMismatch` for what cannot be a key of a state."""
    if not isinstance(key, str) or not key or key.startswith(("@", "$")):
        raise StateMismatch(f"{what}: key {key!r}: a text that does not start with '@' or '$' is expected")


def checked(source: Source) -> Source:
    """The source. Raises `StateMismatch` if one of its tensors is of a type or name that no commit can hold."""
    for name, form in source.tensors.items():
        if form.dtype not in DTYPES:
            raise StateMismatch(f"{source.what}: {name}: a {form.dtype} tensor cannot be in a checkpoint; convert it")
        if len(name) > MAX_PATH:
            raise StateMismatch(
                f"{source.what}: {name[:80]}…: a path of {len(name)} characters; {MAX_PATH} are allowed"
            )
    return source


def _is_state_dict(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items()
    )  # fmt: skip


def _kind(name: str, value: object, stateful: frozenset[str]) -> str:
    if name in stateful or is_optimizer(value) or is_schedule_state(value):
        return "stateful"
    return "module" if _is_state_dict(value) else "value"


def is_optimizer(value: object) -> bool:
    """Whether the value has the form of an optimizer's `state_dict`."""
    return isinstance(value, Mapping) and set(value) == {"state", "param_groups"}


def _by_name(value: Any, keys: Mapping[Any, Any]) -> tuple[str, dict[str, Any]] | None:
    """An optimizer's state by its parameters' names, as `torch.distributed.checkpoint.state_dict` gives it: in the form
    that a commit has for it, with the options of each parameter. None for anything else."""
    if not is_optimizer(value) or not isinstance(value["param_groups"], list):
        return None
    groups = value["param_groups"]
    if not all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups):
        return None
    names = [name for group in groups for name in group["params"]]
    modules = [k for k, module in keys.items() if _is_state_dict(module) and names and module.keys() >= set(names)]
    if len(modules) != 1 or not value["state"].keys() <= set(names):
        return None
    (model,) = modules
    options = {
        f"{model}.{name}": {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in groups
        for name in group["params"]
    }
    state = {f"{model}.{name}": moments for name, moments in value["state"].items()}
    return "optimizer", {"state": state, "param_groups": options}


def _called(value: object) -> str:
    return f"a {type(value).__name__}" + (" of nothing" if isinstance(value, Mapping) else "")
