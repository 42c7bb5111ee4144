"""How lists and maps merge: which lists are maps by key, which are sets, and what is one value.

Server-side apply and the ratcheting of validation both need to say which element of the new object is which of the old
one. Where a shape says nothing, a map is merged field by field and a list is one value, as the server has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one value. `keys` makes a list a map by these fields of its elements, `of_values` makes it a set."""

    fields: Mapping[str, Shape] = field(default_factory=dict)
    rest: Shape | None = None
    items: Shape | None = None
    keys: tuple[str, ...] = ()
    of_values: bool = False
    atomic: bool = False
    key_defaults: Mapping[str, object] = field(default_factory=dict)

    def child(self, name: str) -> Shape:
        """The shape of field `name` of a map."""
        return self.fields.get(name) or self.rest or DEFAULT

    def item(self) -> Shape:
        """The shape of a list's elements."""
        return self.items or DEFAULT


DEFAULT = Shape()
ATOMIC = Shape(atomic=True)
SET = Shape(of_values=True)


def by(*keys: str, items: Shape | None = None, **defaults: object) -> Shape:
    """A list that is a map by `keys`; `defaults` stand in for a key that an element lacks."""
    return Shape(keys=keys, items=items, key_defaults=defaults)


METADATA = Shape(fields={"ownerReferences": by("uid"), "finalizers": SET})
_CONTAINERS = by(
    "name",
    items=Shape(
        fields={
            "env": by("name"),
            "ports": by("containerPort", "protocol", protocol="TCP"),
            "volumeMounts": by("mountPath"),
            "volumeDevices": by("devicePath"),
        }
    ),
)
POD = Shape(
    fields={
        "metadata": METADATA,
        "spec": Shape(
            fields={
                "containers": _CONTAINERS,
                "initContainers": _CONTAINERS,
                "volumes": by("name"),
                "imagePullSecrets": by("name"),
                "hostAliases": by("ip"),
                "topologySpreadConstraints": by("topologyKey", "whenUnsatisfiable"),
                "schedulingGates": by("name"),
                "nodeSelector": ATOMIC,
            }
        ),
        "status": Shape(fields={"conditions": by("type"), "podIPs": by("ip"), "hostIPs": ATOMIC}),
    }
)
SERVICE = Shape(
    fields={
        "metadata": METADATA,
        "spec": Shape(fields={"ports": by("port", "protocol", protocol="TCP"), "selector": ATOMIC}),
        "status": Shape(fields={"conditions": by("type")}),
    }
)
NODE = Shape(
    fields={
        "metadata": METADATA,
        "status": Shape(fields={"conditions": by("type"), "addresses": by("type")}),
    }
)
PLAIN = Shape(fields={"metadata": METADATA})
