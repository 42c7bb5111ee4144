"""Finds the fields of a pod template that Kubernetes does not know, by the official client's models.

A CRD cannot contain the schema of a pod. So it keeps whatever a template says, and a misspelt `comand` is dropped when
the pod is created. Invariant: an object without a model is not looked into, and all others are.
"""

import re
from collections.abc import Iterator
from typing import Any

from kubernetes.aio.client import models

# The client's releases write types as "list[V1Pod]" or "List[V1Pod]", "dict(str, str)" or "Dict[str, str]".
_LIST, _DICT = re.compile(r"[Ll]ist\[(.+)\]"), re.compile(r"[Dd]ict[\[(]str, (.+)[\])]")


def unknown_fields(value: Any, model: str, path: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The unknown fields of an object that should be a `model`, for example "V1PodTemplateSpec".

    Each entry has the path of the object with the field, the field's name, and the names of the object's known fields.
    """
    if (matched := _LIST.fullmatch(model)) is not None:
        for index, item in enumerate(value if isinstance(value, list) else ()):
            yield from unknown_fields(item, matched[1], f"{path}[{index}]")
    elif (matched := _DICT.fullmatch(model)) is not None:
        for name, item in value.items() if isinstance(value, dict) else ():
            yield from unknown_fields(item, matched[1], f"{path}.{name}")
    elif isinstance(value, dict) and (kind := getattr(models, model, None)) is not None:
        types = {wire: kind.openapi_types[name] for name, wire in kind.attribute_map.items()}
        for name, item in value.items():
            if name in types:
                yield from unknown_fields(item, types[name], f"{path}.{name}")
            else:
                yield path, str(name), tuple(types)
