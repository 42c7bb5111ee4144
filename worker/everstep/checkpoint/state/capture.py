"""From the mapping that a script passes to what a commit holds, and back into the same objects.

Knows torch's protocols (`state_dict`, `load_state_dict`) and nothing of files. Invariant: `apply` checks that every
key fits before it changes the first object.

A state is replicated: each rank has the same, and the commit has it once. Exceptions:

- Modules' buffers may differ between ranks (BatchNorm). The commit has rank 0's, which DDP's next forward pass uses.
- If an object's class sets `everstep_per_rank = True` (`RngState`), the commit has each rank's own.
- If an object's class sets `everstep_optional = True`, it stays as it is when a commit does not have it.
- If an object is marked with `Union`, each rank may have other names. The commit has all, and each rank gets its own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.state import layouts, named, schedules
from everstep.checkpoint.state.divided import DividedOptimizer
from everstep.checkpoint.state.layouts import shows_twice
from everstep.checkpoint.state.modules import Answer, bare, fill
from everstep.checkpoint.state.refilling import Taken, in_classes_of, is_alike, is_array, refilled
from everstep.checkpoint.state.sharding import local_of, placed_as
from everstep.checkpoint.state.tree import Flattener, join, references, unflatten
from everstep.checkpoint.state.union import (
    Union,
    inside,
    levels_of,
    pruned,
    pruned_to_numbers,
    pruned_to_parameters,
)
from everstep.contract.refusal import OWN_MODULES
from everstep.torch_private.modules import set_versions, versions_in

log = logging.getLogger("everstep.checkpoint")

# The errors that an object may raise for values of other types and shapes than its own.
MALFORMED = (RuntimeError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True)
class Captured:
    """A state taken apart. The tensors are views of the live ones: stage them before training goes on."""

    values: dict[str, Json]
    tensors: dict[str, torch.Tensor]
    own_values: dict[str, Json]
    own_tensors: dict[str, torch.Tensor]
    parameters: frozenset[str]  # the tensors that are parameters of modules
    buffers: frozenset[str]  # the other tensors of modules
    united: frozenset[str] = frozenset()  # the tensors of objects that are marked with `Union`
    unions: frozenset[str] = frozenset()  # the keys of these objects
    filled: frozenset[str] = frozenset()  # the tensors of modules, and those that are values of the state themselves
    refilled: frozenset[str] = frozenset()  # the tensors in the state's dicts and lists


def capture(state: Mapping[str, Any], rank: int) -> Captured:
    """Take a state apart. Raises `StateMismatch` naming the first value that no checkpoint can hold."""
    if not isinstance(state, Mapping):
        raise StateMismatch(f"a state is a dict, not a {type(state).__qualname__}: {{'model': model}}")
    shared, own = Flattener(), Flattener()
    values: dict[str, Json] = {}
    own_values: dict[str, Json] = {}
    parameters, buffers, united = set[str](), set[str](), set[str]()
    filled, refilled = set[str](), set[str]()
    unions = frozenset(key for key, target in state.items() if isinstance(target, Union))
    for key, marked in state.items():
        target = inside(marked)
        shared.ties = key not in unions
        if not isinstance(key, str) or not key or key.startswith(("@", "$")):
            raise StateMismatch(f"state key {key!r}: a text that does not start with '@' or '$' is expected")
        if isinstance(target, dict) and set(target) == {"state", "param_groups"}:
            raise StateMismatch(
                f"{key}: this is the state_dict() of an optimizer, and restoring it would change nothing of the "
                f"optimizer's. Give the optimizer itself: {{{key!r}: optimizer}}"
            )
        if isinstance(target, torch.Tensor) and _shows_twice(target):
            raise StateMismatch(
                f"{key}: several of its elements share one place in memory, as expand() makes it, so a commit could "
                f"not be read into it. Give a tensor with memory of its own: {key} = {key}.clone()"
            )
        if getattr(target, "everstep_per_rank", False):
            own_values[key] = _encode(own, state, key, f"@{rank}/{key}")
        else:
            values[key] = _encode(shared, state, key)
            if key in unions:
                united.update(references(values[key]))
            if isinstance(target, torch.Tensor | torch.nn.Module):
                filled.update(references(values[key]))
            elif kind_of(marked) == "value":
                refilled.update(references(values[key]))
            if isinstance(target, torch.nn.Module):
                parameters.update(_parameters(target, values[key]))
                buffers.update(references(values[key]))
    _name_parameters(state, values)
    return Captured(
        values, shared.tensors, own_values, own.tensors, frozenset(parameters), frozenset(buffers - parameters),
        frozenset(united), unions, frozenset(filled), frozenset(refilled),
    )  # fmt: skip


def _name_parameters(state: Mapping[str, Any], values: Mapping[str, Json]) -> None:
    """Add to each optimizer's state its class, and the path of each parameter by its number."""
    paths: dict[int, str] | None = None
    for key, marked in state.items():
        body, target, stepped = values.get(key), marked, marked
        if isinstance(part := inside(marked), DividedOptimizer):
            target, stepped = part.optimizer, part.of_own
        if not isinstance(target, torch.optim.Optimizer) or not isinstance(body, dict):
            continue
        if paths is None:
            paths = _parameter_paths(state)
        body["class"] = type(stepped).__name__
        names = named.names_in(target, paths)
        if names is not None:
            body["names"] = list[Json](names)


def _parameter_paths(state: Mapping[str, Any]) -> dict[int, str]:
    """The path of each tensor of the state that an optimizer may hold, by its `id`: modules' parameters, then tensors
    that the state holds itself. A tied one has the first of its paths."""
    paths: dict[int, str] = {}
    for key, marked in state.items():
        if isinstance(module := inside(marked), torch.nn.Module):
            for path, parameter in bare(module).named_parameters(remove_duplicate=False):
                paths.setdefault(id(parameter), join(key, path))
    for key, marked in state.items():
        if kind_of(marked) == "value":
            for path, tensor in _tensors_in(inside(marked), key):
                paths.setdefault(id(tensor), path)
    return paths


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a plain value that was flattened, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, join(path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors_in(item, join(path, number))


def bodies_for(state: Mapping[str, Any], saved: Mapping[str, Any], rank: int) -> dict[str, Mapping[str, Any]]:
    """The commit's content for each key of `state`. A rank that the commit does not know keeps its own per-rank state.

    Raises `StateMismatch` for a key that the commit lacks and that is not optional, or that is of another kind there.
    """
    values, ranks = saved.get("state", {}), saved.get("ranks", [])
    bodies: dict[str, Mapping[str, Any]] = {}
    for key, target in state.items():
        if getattr(target, "everstep_per_rank", False):
            if rank < len(ranks) and key in ranks[rank]:
                bodies[key] = ranks[rank][key]
            continue
        if key not in values:
            if getattr(target, "everstep_optional", False):
                continue
            raise StateMismatch(f"the commit has no {key!r}; it has {', '.join(sorted(values)) or 'nothing'}")
        bodies[key] = values[key]
    for key, body in bodies.items():
        if body["kind"] != kind_of(state[key]):
            raise StateMismatch(
                f"{key}: the commit holds a {body['kind']}, the state passed in a {kind_of(state[key])}"
            )
    return bodies


def body_for_rank(state: Mapping[str, Any], key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a key's body that this rank needs: all of it, or only the names that it has. Raises
    `StateMismatch`."""
    target = inside(state[key])
    if body["kind"] == "stateful" and kind_of(state[key]) == "optimizer":
        raise StateMismatch(
            f"{key}: the commit holds an optimizer's state by the numbers of its parameters, as it was saved "
            "without everstep.Union. Restore it without as well, and mark it for the saves that follow"
        )
    if body["kind"] == "optimizer" and isinstance(target, torch.optim.Optimizer):
        order = named.numbered(target, _names(state), key)
        return {**body, "tree": pruned_to_parameters(body["tree"], order, key)}
    if isinstance(target, DividedOptimizer):
        return {**body, "tree": pruned_to_numbers(body["tree"], target.numbers())}
    if not isinstance(state[key], Union):
        return dict(body)
    live = target if kind_of(target) == "value" else bare(target).state_dict()
    return {**body, "tree": pruned(body["tree"], live, key, levels_of(body))}


def _names(state: Mapping[str, Any]) -> dict[int, str]:
    modules = {key: inside(target) for key, target in state.items() if isinstance(inside(target), torch.nn.Module)}
    return named.names_of({key: bare(module) for key, module in modules.items()})


def parameters_of(state: Mapping[str, Any], key: str, body: Mapping[str, Any]) -> dict[str | int, Any]:
    """The parameters of an optimizer by the names or numbers that they have in `body`, its state in a commit."""
    optimizer = inside(state[key])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if body["kind"] == "optimizer":
        return dict(zip(named.numbered(optimizer, _names(state), key), parameters, strict=True))
    return dict(enumerate(parameters))


def apply(
    state: Mapping[str, Any],
    saved: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    *,
    whole: bool = True,
    bodies: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Answer]:
    """Put a commit's values back into `state`, in place. `whole`: log each key of the commit that `state` lacks.
    `bodies`: the bodies that `fit` made for this state; without them the commit's own.

    Modules, optimizers and other objects get `load_state_dict`. Tensors are copied into. Mappings and lists are
    refilled, and so are the objects in them, because a script may have names of its own for these. Plain values are set
    in `state` itself, which must then be mutable. Returns, by key, what each partly filled module reported (see
    `Fit.judged`). Raises `StateMismatch`.
    """
    answers: dict[str, Answer] = {}
    if bodies is None:
        bodies = bodies_for(state, saved, rank)
    taken = Taken()
    values = saved.get("state", {})
    for key in sorted(k for k in set(values) - set(state) if not values[k].get("union")) if whole else ():
        log.warning("the commit holds %r, which the state passed in does not ask for", key)
    for key, body in bodies.items():
        tree = unflatten(body["tree"], tensors, key)
        try:
            if body["kind"] == "optimizer":
                _decode_optimizer(state, key, tree, body)
            elif (answer := _decode(state, key, tree, body, taken)) is not None:
                answers[key] = answer
        except torch.OutOfMemoryError:
            raise  # this is no fault of the commit
        except MALFORMED as e:
            raise StateMismatch(f"{key}: the commit does not fit the object passed in: {e}") from e
    return answers


def _encode(flattener: Flattener, state: Mapping[str, Any], key: str, path: str | None = None) -> Json:
    path = key if path is None else path
    kind, target = kind_of(state[key]), inside(state[key])
    if kind == "value":
        return {"kind": kind, "tree": flattener.flatten(target, path)}
    if kind == "optimizer":
        tree = named.by_name(target, _names(state), key)
    else:
        tree = schedules.state_of(target) if isinstance(target, LRScheduler) else bare(target).state_dict()
    body: dict[str, Json] = {"kind": kind, "tree": flattener.flatten(tree, path)}
    if kind == "optimizer":
        body["class"] = type(target).__name__
    metadata = versions_in(tree)
    if kind == "module" and metadata:
        # Versions of the modules' own formats: load_state_dict migrates old ones by them.
        body["metadata"] = Flattener().flatten(dict(metadata), f"{path} (metadata)")
    return body


def _parameters(target: torch.nn.Module, body: Any) -> Iterator[str]:
    """The names of the tensors that are parameters of a module; its buffers may well hold infinity, as masks do."""
    names = {name for name, _ in bare(target).named_parameters(remove_duplicate=False)}
    for name, value in body["tree"].items():
        if name in names:
            yield from references(value)


def _decode(state: Mapping[str, Any], key: str, tree: Any, body: Mapping[str, Any], taken: Taken) -> Answer | None:
    target, metadata, partial = inside(state[key]), body.get("metadata"), bool(body.get("partial"))
    kind = kind_of(target)
    if kind == "module":
        if metadata:
            tree = OrderedDict(tree)  # which takes attributes, as torch's own does
            set_versions(tree, unflatten(metadata, {}, key))
        return fill(bare(target), tree, partial=partial)
    if kind == "stateful":
        if partial:
            kept = target.state_dict()["state"]
            tree = {**tree, "state": {**{n: kept[n] for n in body["kept"] if n in kept}, **tree["state"]}}
        if isinstance(target, LRScheduler):
            schedules.load(target, tree)
            return None
        target.load_state_dict(_of_its_classes(target, tree))
        if isinstance(target, torch.optim.Optimizer) and not body.get("cast"):
            named.keep_types(target, tree)
    elif isinstance(target, torch.Tensor):
        if target.shape != tree.shape or (target.dtype != tree.dtype and not body.get("cast")):
            raise ValueError(f"{tree.dtype} {tuple(tree.shape)} in the commit, {target.dtype} {tuple(target.shape)}")
        with torch.inference_mode(target.is_inference()), torch.no_grad():  # inference_mode(False) turns gradients on
            target.copy_(placed_as(target, tree))
    elif (isinstance(target, dict) and isinstance(tree, dict)) or (isinstance(target, list) and isinstance(tree, list)):
        taken.objects.discard(id(target))
        refilled(target, tree, taken, keep=partial, cast=bool(body.get("cast")))
    elif is_array(target) and is_alike(target, tree):
        target[...] = tree
    elif isinstance(state, MutableMapping) and not isinstance(state[key], Union):
        state[key] = refilled(target, tree, taken, cast=bool(body.get("cast")))
    else:
        raise TypeError("a plain value can be restored only into a mutable mapping (a dict)")
    return None


def _of_its_classes(target: Any, tree: Any) -> Any:
    if isinstance(target, torch.optim.Optimizer) or type(target).__module__.startswith(OWN_MODULES):
        return tree  # these convert the values themselves
    try:
        live = target.state_dict()
    except Exception:  # perhaps it has a state only after a load
        return tree
    return in_classes_of(live, tree)


def _decode_optimizer(state: Mapping[str, Any], key: str, tree: Any, body: Mapping[str, Any]) -> None:
    """Fill an optimizer whose state was saved by the names of its parameters."""
    target = inside(state[key])
    numbered = named.by_number(target, _names(state), key, tree)
    target.load_state_dict(numbered)
    if not body.get("cast"):
        named.keep_types(target, numbered)


def _shows_twice(tensor: torch.Tensor) -> bool:
    """Whether several elements of the tensor share memory."""
    if not layouts.is_dense(tensor) or torch.nn.parameter.is_lazy(tensor):
        return False
    own = local_of(tensor.detach())
    return shows_twice(own.shape, own.stride())


def kind_of(marked: Any) -> str:
    target = inside(marked)
    if isinstance(marked, Union) and isinstance(target, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(target, torch.nn.Module):
        return "module"
    if callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None)):
        return "stateful"
    return "value"
