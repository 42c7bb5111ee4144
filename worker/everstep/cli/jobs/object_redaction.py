"""Keeps credentials out of the API objects of a report.

`contract.redact` knows a credential by its shape or by the name before it. In an object the name may be the key above a
text, or the item of a list before it. Invariant: a text below such a name is hidden, unless the schema of Kubernetes
says that the text only names something (a Secret, a taint).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from everstep.contract import redact

# What an object repeats of itself, with all values.
LEFT_OUT = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
# Fields of Kubernetes whose names look like those of secrets, and whose values are names.
_NAME_FIELDS = ("key", "secretName", "secretNamespace", "topologyKey", "matchLabelKeys", "mismatchLabelKeys")
# Below these the names are the user's own, so none of them is a field of Kubernetes.
_USERS_NAMES = ("annotations", "labels", "volumeAttributes", "options", "parameters")
_GZIP = "H4sI"  # how gzip's first bytes look in base64; some tools keep a whole object so
_OPTION = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?|-[A-Za-z]", re.DOTALL)
_OPTION_NAME = re.compile(r"--?[A-Za-z][\w.-]*")
# `--name value`, `--name=value`, `NAME=value` in a shell's line.
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]{0,80})(?P<between>=|(?<=[\w.-])\s{1,3}(?!\s|--[A-Za-z]|-[A-Za-z]\b))"
    r"""(?P<value>"(?:[^"\\]|\\.)*"?|'[^']*'?|[^\s;&|"']+)""",
    re.DOTALL,
)


def without_values(data: Any, *, secret: bool = False, users: bool = False) -> Any:
    """The object without secrets, and without the values of environment variables (`env: [{name, value}]`).
    `secret`: it stands below or behind the name of one. `users`: the names in it are the user's own."""
    match data:
        case bool() | None:
            return data
        case str():
            return redact.HIDDEN if secret else _text(data)
        case {"name": name, "value": _}:
            return {"name": name, "value": redact.HIDDEN}
        case dict():
            return {
                key: without_values(
                    value,
                    secret=redact.secret_name(key) and (users or key not in _NAME_FIELDS),
                    users=users or key in _USERS_NAMES,
                )
                for key, value in data.items()
                if key not in LEFT_OUT
            }
        case list():
            return list(_items(data, secret, users))
        case _:  # a number below such a name is a count of tokens, where Kubernetes or Everstep chose the name
            return redact.HIDDEN if secret and users else data


def _items(items: Sequence[Any], secret: bool, users: bool) -> Iterator[Any]:
    behind = False  # an option whose value is secret
    for item in items:
        if isinstance(item, str):
            hide = behind and _OPTION.fullmatch(item) is None
            behind = _OPTION_NAME.fullmatch(item) is not None and redact.secret_name(item)
            yield without_values(item, secret=secret or hide, users=users)
        else:
            yield without_values(item, secret=secret, users=users)


def _text(value: str) -> str:
    if value.startswith(_GZIP):
        return redact.HIDDEN
    if value.startswith(("{", "[")):
        try:
            return json.dumps(without_values(json.loads(value), users=True))
        except (ValueError, RecursionError):
            pass  # it only looks like JSON
    return redact.text(_ASSIGNED.sub(_assigned, value[: redact.MAX_TEXT]))


def _assigned(match: re.Match[str]) -> str:
    name, between = match["name"], match["between"]
    named = redact.secret_name(name) and (between == "=" or name.startswith("-"))
    return f"{name}{between}{redact.HIDDEN}" if named else match[0]
