"""Computes with quantities: what a pod requests, and what a node has. Pure.

Invariant: sums are exact (fractions, not floats). Cpu and memory that a node does not state are unbounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?\d{1,3}))?")
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "k": Fraction(10**3)} | {
    letter: Fraction(1000**power) for power, letter in enumerate("MGTPE", 2)
}
# A laptop need not state these. GPUs and other resources exist only if they are stated.
UNBOUNDED = frozenset({"cpu", "memory", "ephemeral-storage"})


def quantity(text: str, of: str = "resource") -> Fraction:
    """`100m`, `1.5Gi`, `2e3`, as a number. Raises ValueError that names `of`."""
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{of}: {text!r} is not a quantity such as 500m, 2 or 1.5Gi")
    number, binary, decimal, exponent = match.groups()
    factor: Fraction | int = 1
    if binary:
        factor = _BINARY[binary]
    elif decimal:
        factor = _DECIMAL[decimal]
    elif exponent:
        factor = Fraction(10) ** int(exponent)
    return Fraction(number) * factor


def requests_of(spec: Mapping[str, Any]) -> dict[str, Fraction]:
    """All requests of a pod. A limit stands for a missing request. Raises ValueError."""
    main = _sum(_requests(c) for c in spec.get("containers") or ())
    for init in spec.get("initContainers") or ():
        # Init containers run one by one, before the others.
        for name, amount in _requests(init).items():
            main[name] = max(main.get(name, Fraction(0)), amount)
    return {**main, "pods": Fraction(1)}


def _requests(container: Mapping[str, Any]) -> dict[str, Fraction]:
    resources = container.get("resources") or {}
    stated = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(text, name) for name, text in stated.items()}


def _sum(parts: Iterable[Mapping[str, Fraction]]) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Fraction(0)) + amount
    return total


def lacking(
    capacity: Mapping[str, Fraction], used: Iterable[Mapping[str, Fraction]], wanted: Mapping[str, Fraction]
) -> tuple[str, ...]:
    """The resources of which too little is left on the node, sorted."""
    total = _sum(used)
    return tuple(
        sorted(
            name
            for name, amount in wanted.items()
            if amount > 0
            and not (name in UNBOUNDED and name not in capacity)
            and total.get(name, Fraction(0)) + amount > capacity.get(name, Fraction(0))
        )
    )
