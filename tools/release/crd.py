"""Whether a CRD takes what the last release's took: `python -m release.crd OLD NEW`.

Each object that the old one accepts, the new one has to accept and keep as it is, and a client of the old one has to
find what it looks for. A difference is allowed only if a rule here says that it loosens; any other is refused, also one
of a kind that no rule knows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from release import commands
from release.errors import ReleaseError

CURRENT = "manifests/crd.yaml"
RELEASED = "manifests/released"  # a file VERSION.yaml for each release
Node = dict[str, Any]

WORDS_ONLY = {"description", "title", "example", "externalDocs"}
UPPER = {"maximum", "maxLength", "maxItems", "maxProperties"}
LOWER = {"minimum", "minLength", "minItems", "minProperties"}
# Without it more is accepted: it may go, and neither come nor change.
RESTRICTION = {"pattern", "format", "uniqueItems", "exclusiveMaximum", "exclusiveMinimum", "multipleOf"}
# With it more is accepted: it may come, and not go.
PERMISSION = {"nullable", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"}
# Of a version: what people see of it, and no client reads.
SHOWN = {"additionalPrinterColumns", "deprecated", "deprecationWarning"}
NAMES = ("kind", "listKind", "plural", "singular")


def incompatible(old: Node, new: Node) -> list[str]:
    """What of `new` breaks an object or a client of `old`, a line each; empty if nothing does."""
    return [*_of_the_kind(old["spec"], new["spec"]), *_of_versions(old["spec"], new["spec"])]


def _of_the_kind(old: Node, new: Node) -> Iterator[str]:
    for key in ("group", "scope", "preserveUnknownFields", "conversion"):
        if old.get(key) != new.get(key):
            yield f"spec.{key} was {old.get(key)!r} and is {new.get(key)!r}"
    for key in NAMES:
        if old["names"].get(key) != new["names"].get(key):
            yield f"spec.names.{key} was {old['names'].get(key)!r} and is {new['names'].get(key)!r}"
    for key in ("shortNames", "categories"):
        for name in _missing(old["names"].get(key), new["names"].get(key)):
            yield f"spec.names.{key}: {name!r} was removed"


def _of_versions(old: Node, new: Node) -> Iterator[str]:
    versions = {version["name"]: version for version in new["versions"]}
    for before in old["versions"]:
        name = before["name"]
        after = versions.get(name)
        if after is None:
            yield f"version {name} was removed"
            continue
        if before["served"] and not after["served"]:
            yield f"version {name} is no longer served"
        yield from _of_subresources(name, before.get("subresources", {}), after.get("subresources", {}))
        for field in _missing(before.get("selectableFields"), after.get("selectableFields")):
            yield f"{name}: the selectable field {field['jsonPath']} was removed"
        judged = SHOWN | {"name", "served", "storage", "subresources", "selectableFields", "schema"}
        for key in sorted((before.keys() | after.keys()) - judged):
            if before.get(key) != after.get(key):
                yield f"{name}: {key} was {before.get(key)!r} and is {after.get(key)!r}"
        yield from _of_schema(name, before["schema"]["openAPIV3Schema"], after["schema"]["openAPIV3Schema"])


def _of_subresources(name: str, before: Node, after: Node) -> Iterator[str]:
    for key, value in before.items():
        if after.get(key) != value:
            yield f"{name}: the subresource {key} was {value!r} and is {after.get(key)!r}"
    if "status" in after and "status" not in before:
        yield f"{name}: the subresource status is new: writes of an object no longer change its status"


def _of_schema(path: str, old: Node, new: Node) -> Iterator[str]:
    yield from _of_properties(path, old, new)
    yield from _of_type(path, old, new)
    for key in ("items", "additionalProperties"):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _of_schema(f"{path}[]" if key == "items" else f"{path}[*]", before, after)
        elif before != after:
            yield f"{path}: {key} was {_short(before)} and is {_short(after)}"
    for rule in _missing(_rules(new), _rules(old)):
        yield f"{path}: the rule {rule[0]!r} is new"
    judged = {"properties", "required", "type", "items", "additionalProperties", "x-kubernetes-validations"}
    for key in sorted((old.keys() | new.keys()) - judged - WORDS_ONLY):
        if not _loosens(key, old.get(key), new.get(key)):
            yield f"{path}: {key} was {_short(old.get(key))} and is {_short(new.get(key))}"


def _of_properties(path: str, old: Node, new: Node) -> Iterator[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    for name, schema in before.items():
        if name not in after:
            yield f"{path}.{name} was removed"
        else:
            yield from _of_schema(f"{path}.{name}", schema, after[name])
    if old.get("x-kubernetes-preserve-unknown-fields"):
        for name in _missing(list(after), list(before)):
            yield f"{path}.{name} is new where any field was accepted, with any value"
    for name in _missing(new.get("required"), old.get("required")):
        yield f"{path}.{name} is required now"


def _of_type(path: str, old: Node, new: Node) -> Iterator[str]:
    before, after = old.get("type"), new.get("type")
    if before == after or (before, after) == ("integer", "number"):
        return
    if after is None and before in ("integer", "string") and new.get("x-kubernetes-int-or-string"):
        return
    yield f"{path}: type was {before} and is {after}"


def _loosens(key: str, before: Any, after: Any) -> bool:
    """Whether every value that the schema accepted with `before` is accepted with `after`. None: the key is absent."""
    if before == after:
        return True
    if key in UPPER:
        return after is None or (before is not None and after >= before)
    if key in LOWER:
        return after is None or (before is not None and after <= before)
    if key == "enum":
        return after is None or (before is not None and not _missing(before, after))
    if key in RESTRICTION:
        return not after
    return key in PERMISSION and not before


def _rules(schema: Node) -> list[tuple[str, bool]]:
    """The rules in CEL, without the words that a refusal has."""
    rules = schema.get("x-kubernetes-validations", [])
    return [(rule["rule"], bool(rule.get("optionalOldSelf"))) for rule in rules]


def _missing(wanted: list[Any] | None, present: list[Any] | None) -> list[Any]:
    return [one for one in wanted or [] if one not in (present or [])]


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def last_released(root: Path, before: str = "") -> Path | None:
    """The CRD of the newest release; of those before a version, if one is given. None where there is none."""
    kept = {Version(path.stem): path for path in (root / RELEASED).glob("*.yaml")}
    versions = [version for version in kept if not before or version < Version(before)]
    return kept[max(versions)] if versions else None


def check(old: Path, new: Path) -> None:
    """Raises `ReleaseError` with each incompatible difference of two CRD files."""
    problems = incompatible(*(yaml.safe_load(path.read_text()) for path in (old, new)))
    if problems:
        lines = "\n  ".join(problems)
        raise ReleaseError(
            f"{new} does not take what {old} takes:\n  {lines}\n"
            "Keep what clients and stored jobs use, or serve another version of the kind beside this one"
        )


def check_release(root: Path, version: str) -> None:
    """Raises `ReleaseError` if the checkout's CRD does not take what that of the release before `version` took."""
    last = last_released(root, version)
    if last is not None:
        check(last, root / CURRENT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="release.crd", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    return commands.ended(parser.prog, lambda: check(arguments.old, arguments.new))


if __name__ == "__main__":
    sys.exit(main())
