"""Server-side apply: who owns which field, what an apply changes, and what conflicts.

After Kubernetes' structured-merge-diff. A field is a path of steps: a name, or a `Member` of a list that is a map or a
set. Ownership is kept beside the object, per (manager, operation, subresource), as the real server keeps it inside
metadata.managedFields. Invariant: every field that an apply set is owned by its manager, and a field disappears with
the apply that leaves it out only if nobody else owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from everstep_operator.local.memory.shapes import Shape
from everstep_operator.local.memory.store import Json, Write


@dataclass(frozen=True, slots=True)
class Member:
    """One element of a list, by the values of its keys or, in a set, by itself."""

    keys: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "[" + ",".join(f'{name}="{value}"' if name else f'="{value}"' for name, value in self.keys) + "]"


Step: TypeAlias = str | Member
Path: TypeAlias = tuple[Step, ...]
Fields: TypeAlias = frozenset[Path]
Owner: TypeAlias = tuple[str, str, str]  # (manager, operation, subresource)
Managers: TypeAlias = Mapping[Owner, Fields]

# Not a client's to own: identity, versions, times.
_SERVERS = frozenset(
    {
        *("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "generateName"),
        *("deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"),
    }
)


def member(item: Any, shape: Shape) -> Member:
    """Which element of the list `item` is."""
    if shape.of_values:
        return Member((("", item),))
    found = item if isinstance(item, dict) else {}
    return Member(tuple((key, found.get(key, shape.key_defaults.get(key))) for key in shape.keys))


def fields_of(value: Any, shape: Shape) -> Iterator[tuple[Path, Any]]:
    """Every field that `value` sets, and what it sets it to; of a list's element also that it exists."""
    yield from _walk(value, shape, ())


def _walk(value: Any, shape: Shape, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value and not shape.atomic:
        for name, item in value.items():
            yield from _walk(item, shape.child(name), (*path, name))
    elif isinstance(value, list) and value and (shape.keys or shape.of_values):
        for item in value:
            here = (*path, member(item, shape))
            if shape.of_values:
                yield here, item
            else:
                yield here, None
                yield from _walk(item, shape.item(), here)
    else:
        yield path, value


def _own(value: Json, shape: Shape) -> dict[Path, Any]:
    """The fields of a whole object that a client can own."""
    found = {}
    for path, item in fields_of(value, shape):
        if path[0] in ("apiVersion", "kind") or (path[0] == "metadata" and (len(path) < 2 or path[1] in _SERVERS)):
            continue
        found[path] = item
    return found


def settle(managers: Managers, writes: Iterable[Write], shape: Shape) -> Managers:
    """Who owns what after `writes`: who changes a field owns it, alone."""
    result = dict(managers)
    for manager, operation, subresource, before, after in writes:
        old = _own(before, shape) if before is not None else {}
        new = _own(after, shape)
        changed = frozenset(path for path, item in new.items() if path not in old or old[path] != item)
        gone = old.keys() - new.keys()
        for other in list(result):
            result[other] -= changed | gone
        owner = (manager, operation, subresource)
        result[owner] = result.get(owner, frozenset()) | changed
        result = {one: fields for one, fields in result.items() if fields}
    return result


@dataclass(frozen=True, slots=True)
class Clash:
    """A field that another manager owns and that the apply would change."""

    owner: Owner
    path: Path

    @property
    def field(self) -> str:
        return "".join(str(step) if isinstance(step, Member) else f".{step}" for step in self.path)


@dataclass(frozen=True, slots=True)
class Applied:
    """The object after an apply, who owns what then, and whom it clashed with (all of them overruled)."""

    raw: Json
    managers: Managers
    clashes: tuple[Clash, ...]


def apply(live: Json, managers: Managers, config: Json, owner: Owner, shape: Shape) -> Applied:
    """Lay `config` over `live` for `owner`: its fields are set, those that it set before and left out now go."""
    wanted = _own(config, shape)
    current = _own(live, shape)
    fields = frozenset(wanted)
    others = {one: kept for one, kept in managers.items() if one != owner}
    changed = frozenset(path for path, item in wanted.items() if path not in current or current[path] != item)
    clashes = tuple(
        sorted(
            (Clash(one, path) for one, kept in others.items() for path in kept & changed),
            key=lambda clash: (clash.owner, clash.field),
        )
    )
    # What is overruled changes hands; what both set to the same value is owned by both.
    others = {one: kept - changed for one, kept in others.items()}
    held = frozenset().union(*others.values())
    left_out = managers.get(owner, frozenset()) - fields
    raw = merged(live, config, shape)
    gone = {path for path in left_out if path not in held}
    if gone:
        # An element of a list goes when nobody owns anything in it any more.
        raw = _without(raw, shape, (), gone, held | fields)
    result = {one: kept for one, kept in others.items() if kept}
    result[owner] = fields
    return Applied(raw, {one: kept for one, kept in result.items() if kept}, clashes)


def merged(live: Any, config: Any, shape: Shape) -> Any:
    """`config` over `live`, element by element where the shape has keys."""
    if isinstance(config, dict) and isinstance(live, dict) and not shape.atomic:
        result = dict(live)
        for name, item in config.items():
            result[name] = merged(live[name], item, shape.child(name)) if name in live else item
        return result
    if isinstance(config, list) and isinstance(live, list) and (shape.keys or shape.of_values):
        wanted = {member(item, shape): item for item in config}
        known = {member(item, shape): item for item in live}
        kept = [merged(item, wanted[key], shape.item()) if key in wanted else item for key, item in known.items()]
        return kept + [item for key, item in wanted.items() if key not in known]
    return config


def _without(value: Any, shape: Shape, path: Path, gone: set[Path], held: Fields) -> Any:
    """`value` without the fields in `gone`, and without what became empty by that."""
    if isinstance(value, dict) and not shape.atomic:
        result: Json = {}
        for name, item in value.items():
            here = (*path, name)
            # What was applied as an empty map may have been filled by others since.
            filled = isinstance(item, dict) and item and not shape.child(name).atomic
            if here in gone and not filled:
                continue
            inner = _without(item, shape.child(name), here, gone, held)
            if inner == {} and item != {}:
                continue
            if inner == [] and item != []:
                continue
            result[name] = inner
        return result
    if isinstance(value, list) and (shape.keys or shape.of_values):
        kept = []
        for item in value:
            here = (*path, member(item, shape))
            if here in gone and not any(owned[: len(here)] == here for owned in held):
                continue
            kept.append(_without(item, shape.item(), here, gone, held) if shape.keys else item)
        return kept
    return value
