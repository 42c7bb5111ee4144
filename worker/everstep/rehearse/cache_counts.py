"""Counts how many values the script's caches of functools have computed and keep. A job does not compare these numbers:
they say when its process began, and what is read from a cache shows in the gradients."""

from __future__ import annotations

import functools
import math
import types
from typing import Any

from everstep.train.guards.plain_values import Roots
from everstep.train.guards.script_objects import NamedValue

_UNCHANGEABLE = (bool, int, float, complex, str, bytes, type(None))
_PURE = frozenset({"abs", "bool", "float", "int", "len", "max", "min", "pow", "range", "round", *dir(math)})


class CacheCounts:
    """Of the caches that one walk comes to. Not how often a value was found in one: a cache that is as full gives the
    same. Nor how full one is whose function computes the same anew."""

    def __init__(self) -> None:
        self._counts = dict[str, str]()

    def look(self, named: NamedValue) -> None:
        """At an object that the walk has come to."""
        if not isinstance(cache := named.value, functools._lru_cache_wrapper):
            return
        if not _is_of_arguments_alone(object.__getattribute__(cache, "__dict__").get("__wrapped__")):
            info = functools._lru_cache_wrapper.cache_info(cache)
            self._counts[f"{named.name}.cache_info().misses"] = str(info.misses)
            self._counts[f"{named.name}.cache_info().currsize"] = str(info.currsize)

    def values(self, roots: Roots) -> dict[str, str]:
        """By name, but for what belongs to something tracked."""
        return {name: text for name, text in self._counts.items() if not roots.is_tracked(name)}


def _is_of_arguments_alone(function: Any) -> bool:
    """Whether a function reads no more than its arguments and numbers and texts: it calls nothing but some of Python's
    own functions, and `math`."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    code, scope = function.__code__, function.__globals__
    has_inner = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    return not has_inner and all(type(part) in _UNCHANGEABLE for part in defaults) and all(
        type(scope[name]) in _UNCHANGEABLE or scope[name] is math if name in scope else name in _PURE
        for name in code.co_names
    )  # fmt: skip
