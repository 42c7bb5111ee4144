"""Fields of a pod template that Kubernetes does not know, by the official client's models.

A CRD cannot hold the schema of a pod: whatever a template says is kept, and a misspelt `comand` is dropped when the pod
is created. Invariant: only what the models name as an object is looked into; a model that they lack hides nothing else.
"""

import re
from collections.abc import Iterator
from typing import Any

from kubernetes.aio.client import models

# Its releases write types as "list[V1Pod]" or "List[V1Pod]", "dict(str, str)" or "Dict[str, str]".
_LIST, _DICT = re.compile(r"[Ll]ist\[(.+)\]"), re.compile(r"[Dd]ict[\[(]str, (.+)[\])]")


def unknown_fields(value: Any, model: str, path: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Of an object that should be a `model`, for example "V1PodTemplateSpec".

    Each is the path of the object that has it, its name, and the names that the object could have.
    """
    if (found := _LIST.fullmatch(model)) is not None:
        for index, item in enumerate(value if isinstance(value, list) else ()):
            yield from unknown_fields(item, found[1], f"{path}[{index}]")
    elif (found := _DICT.fullmatch(model)) is not None:
        for name, item in value.items() if isinstance(value, dict) else ():
            yield from unknown_fields(item, found[1], f"{path}.{name}")
    elif isinstance(value, dict) and (kind := getattr(models, model, None)) is not None:
        types = {wire: kind.openapi_types[name] for name, wire in kind.attribute_map.items()}
        for name, item in value.items():
            if name in types:
                yield from unknown_fields(item, types[name], f"{path}.{name}")
            else:
                yield path, str(name), tuple(types)
