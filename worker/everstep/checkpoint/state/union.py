"""A part of the state in which ranks have different names: pipeline stages, experts. The commit has all of them.

Pure trees, but for the marker itself. Invariants: a name that several ranks have has one value, or an error names the
difference; a rank gets exactly the names that it has; no name in the commit is left out without an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.state.tree import join, unflatten

# How many levels of mappings have names as keys, by the kind of the saved object. Below them a value is not divided.
LEVELS: Final = {"module": 1, "optimizer": 2}
_ALL: Final = 64
_SHOWN: Final = 5


class Union:
    """Marks a part of a state of which each rank holds only some names: a pipeline stage, the experts of a rank.

        state = {"model": everstep.Union(stage), "optimizer": everstep.Union(optimizer), "epoch": 0}

    A commit then holds every name that any rank holds, once, and `restore` gives each rank the names that it asks for,
    at any world size and division. A name means the same on all ranks: `layers.7.weight` of the whole model, not
    `0.weight` of a stage. A name that several ranks hold has one value. All ranks mark the same keys.

    `target` is a module, an optimizer whose parameters belong to modules in the same state, a dict, or an object with
    `state_dict` and `load_state_dict`; it is read and filled in place. Raises `StateMismatch` for anything else.
    """

    def __init__(self, target: Any) -> None:
        stateful = callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None))
        if isinstance(target, Union) or not (stateful or isinstance(target, dict)):
            raise StateMismatch(
                f"everstep.Union takes a module, an optimizer, a dict, or an object with state_dict() and "
                f"load_state_dict(), not a {type(target).__qualname__}"
            )
        if getattr(target, "everstep_per_rank", False):
            raise StateMismatch(
                f"a {type(target).__qualname__} is each rank's own (everstep_per_rank): give it without everstep.Union"
            )
        self.target = target


def inside(target: Any) -> Any:
    """The object itself, if it is marked."""
    return target.target if isinstance(target, Union) else target


def levels_of(body: Mapping[str, Any]) -> int:
    """How many levels of mappings in a key's tree are names."""
    return LEVELS.get(body["kind"], _ALL)


def merged(bodies: Sequence[tuple[int, Mapping[str, Any]]], key: str) -> Json:
    """The commit's content under `key`, from the ranks' content as (rank, encoded body).

    Raises `StateMismatch` naming a value that two ranks hold differently.
    """
    (first, body), *others = bodies
    for rank, other in others:
        if other["kind"] != body["kind"]:
            raise StateMismatch(f"{key}: rank {first} holds a {body['kind']}, rank {rank} a {other['kind']}")
    result: dict[str, Json] = {"kind": body["kind"], "union": True}
    if "class" in body:
        if odd := [(rank, b["class"]) for rank, b in others if b.get("class") != body["class"]]:
            raise StateMismatch(f"{key}: rank {first} has {body['class']}, rank {odd[0][0]} has {odd[0][1]}")
        result["class"] = body["class"]
    if "names" in body:
        result["names"] = _merged([(rank, b.get("names")) for rank, b in bodies], f"{key} (names)", 0)
    result["tree"] = _merged([(rank, b["tree"]) for rank, b in bodies], key, levels_of(body))
    metadata = [(rank, b["metadata"]) for rank, b in bodies if "metadata" in b]
    if metadata:
        result["metadata"] = _merged(metadata, f"{key} (metadata)", 1)
    return result


def _merged(trees: Sequence[tuple[int, Json]], path: str, levels: int) -> Json:
    (first, tree), *others = trees
    mappings = [(rank, items) for rank, t in trees if levels and (items := _items(t)) is not None]
    if len(mappings) == len(trees):
        names: dict[str, Json] = {}
        by_name: dict[str, list[tuple[int, Json]]] = {}
        for rank, items in mappings:
            for name, key, value in items:
                names[name] = key
                by_name.setdefault(name, []).append((rank, value))
        by_path: dict[str, str] = {}
        for name in sorted(by_name):
            at = join(path, _shown(names[name]))
            if (before := by_path.setdefault(at, name)) != name:
                mine, theirs = (_short(names[n]) for n in (before, name))
                raise StateMismatch(
                    f"{at}: the ranks hold the names {mine} and {theirs}, which are one in a commit; "
                    "give the same kind of name on all ranks"
                )
        return _mapping(
            [(names[n], _merged(by_name[n], join(path, _shown(names[n])), levels - 1)) for n in sorted(by_name)]
        )
    for rank, other in others:
        if not same(tree, other):
            where, left, right = _difference(tree, other, path)
            raise StateMismatch(
                f"{where}: rank {first} has {_short(left)}, rank {rank} has {_short(right)}. Of what several ranks "
                "hold a commit has one: give it one value, or another name on each rank; what belongs to a rank as "
                "such is given as an object whose class sets everstep_per_rank = True"
            )
    return tree


def _difference(left: Json, right: Json, path: str) -> tuple[str, Json, Json]:
    """The path of the first difference between two encoded values, and both values there."""
    mine, other = _items(left), _items(right)
    if mine is not None and other is not None and {k for k, _, _ in mine} == {k for k, _, _ in other}:
        values = {key: value for key, _, value in other}
        for key, name, value in mine:
            if not same(value, values[key]):
                return _difference(value, values[key], join(path, _shown(name)))
    return path, left, right


def pruned(tree: Json, live: Any, path: str, levels: int) -> Json:
    """The part of a commit's tree with the names that `live` has. Raises `StateMismatch` for a name that the commit
    lacks."""
    items = _items(tree) if levels and isinstance(live, Mapping) else None
    if items is None:
        return tree
    stored = {unflatten(key, {}, path): (key, value) for _, key, value in items}
    chosen = []
    for name in live:
        if name not in stored:
            known = sorted(str(n) for n in stored)
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            raise StateMismatch(
                f"{join(path, name)}: is in the state passed in, and not in the commit; under {path} it has "
                f"{', '.join(known[:_SHOWN]) or 'nothing'}{more}"
            )
        key, value = stored[name]
        chosen.append((key, pruned(value, live[name], join(path, name), levels - 1)))
    return _mapping(chosen)


def pruned_to_numbers(tree: Any, numbers: Collection[int]) -> Json:
    """An optimizer's tree by numbers, with the state of these parameters only. A parameter that was never stepped has
    no state."""
    state = [(key, value) for _, key, value in _items(tree["state"]) or () if key in numbers]
    return {**tree, "state": _mapping(state)}


def pruned_to_parameters(tree: Any, order: Iterable[str], key: str) -> Json:
    """An optimizer's tree by names, with these parameters only. A parameter that was never stepped has no state.

    Raises `StateMismatch` for a parameter that the commit's optimizer did not have.
    """
    names = list(order)
    options = pruned(tree["param_groups"], dict.fromkeys(names), f"{key}/param_groups", 1)
    return {**tree, "param_groups": options, "state": {n: tree["state"][n] for n in names if n in tree["state"]}}


def paths(tree: Json, path: str, levels: int) -> Iterator[str]:
    """The names in a key's tree, as paths."""
    items = _items(tree) if levels else None
    if not items:
        yield path
        return
    for _, key, value in items:
        yield from paths(value, join(path, _shown(key)), levels - 1)


def unrequested(saved: Mapping[str, Mapping[str, Any]], requested: Iterable[str]) -> str | None:
    """The error's text about names in the commit's unions (`saved`, by key) that no rank requests; None if there are
    none.

    A key of which no rank requests any name is left out as a whole, as other keys are.
    """
    known = set(requested)
    left: list[str] = []
    for key, body in sorted(saved.items()):
        names = list(paths(body["tree"], key, levels_of(body)))
        if missed := [name for name in names if name not in known]:
            left += missed if len(missed) < len(names) else []
    if not left:
        return None
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    return (
        f"{', '.join(left[:_SHOWN])}{more}: in the commit, and no rank asks for it. The next save would lose it: "
        "the states of all ranks together must have all that a union holds"
    )


def same(left: Json, right: Json) -> bool:
    """Whether two encoded values are equal, in whatever order their mappings were filled."""
    return json.dumps(canonical(left), sort_keys=True) == json.dumps(canonical(right), sort_keys=True)


def canonical(body: Any) -> Any:
    """An encoded value with its mappings sorted, so that the order in which they were filled does not matter."""
    if isinstance(body, dict):
        if len(body) == 1 and isinstance(pairs := body.get("$dict"), list):
            return {"$dict": sorted(([canonical(k), canonical(v)] for k, v in pairs), key=lambda p: json.dumps(p[0]))}
        return {key: canonical(value) for key, value in body.items()}
    return [canonical(value) for value in body] if isinstance(body, list) else body


def _items(tree: Json) -> list[tuple[str, Json, Json]] | None:
    """The entries of an encoded mapping: a text of the key, the encoded key, the value. None for anything else."""
    if not isinstance(tree, dict):
        return None
    if len(tree) == 1 and isinstance(pairs := tree.get("$dict"), list):
        return [(json.dumps(p[0]), p[0], p[1]) for p in pairs if isinstance(p, list) and len(p) == 2]
    if len(tree) == 1 and next(iter(tree)).startswith("$"):
        return None
    return [(json.dumps(key), key, value) for key, value in tree.items()]


def _mapping(items: Sequence[tuple[Json, Json]]) -> Json:
    plain = {key: value for key, value in items if isinstance(key, str) and not key.startswith("$")}
    if len(plain) == len(items):
        return dict(plain)
    return {"$dict": [[key, value] for key, value in items]}


def _shown(key: Json) -> object:
    try:
        return unflatten(key, {}, "key")
    except StateMismatch:
        return key


def _short(tree: Json) -> str:
    text = json.dumps(tree)
    return text if len(text) <= 80 else f"{text[:80]}…"
