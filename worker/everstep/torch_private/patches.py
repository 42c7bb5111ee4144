"""Replaces functions of other libraries, for good or until the end of a run.

Other libraries (profilers, tracers, other launchers) replace the same functions, before us, meanwhile, or after us. So
whatever is in place is called by what we put there, and the end of a run takes back only what is still ours. A function
that another library has put around ours stays, and ours does nothing in it from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

_ABSENT: Final = object()


def replace(name: str, make: Callable[[Any], Any], *holders: Any) -> None:
    """Put `make(function)` in the place of the function `name` of each holder: a module, a class or an object. Holders
    with the same function get the same replacement, because torch compares functions by identity."""
    made: list[tuple[Any, Any]] = []
    for holder in holders:
        function = getattr(holder, name)
        replacement = next((new for old, new in made if old is function), None)
        if replacement is None:
            replacement = make(function)
            made.append((function, replacement))
        setattr(holder, name, replacement)


def around(call: Callable[..., Any]) -> Callable[[Any], Any]:
    """For `replace`: in the place of the function comes `call`, with the function before its arguments."""

    def make(function: Any) -> Any:
        @functools.wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            return call(function, *arguments, **named)

        return called

    return make


class Replacements:
    """Functions that are replaced until `end`."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []  # holder, name, what its namespace had, ours
        self._on = True

    def put(self, name: str, make: Callable[[Any], Any], *holders: Any) -> None:
        """As `replace`, until `end`."""
        before = [vars(holder).get(name, _ABSENT) for holder in holders]
        replace(name, functools.partial(self._stand_in, make), *holders)
        for holder, own in zip(holders, before, strict=True):
            self._put.append((holder, name, own, vars(holder)[name]))

    def end(self) -> None:
        """Take back what is still ours, newest first. A second call does nothing."""
        self._on = False
        while self._put:
            holder, name, own, ours = self._put.pop()
            if vars(holder).get(name, _ABSENT) is not ours:
                continue  # another library's: it calls ours, which does nothing now, or has taken it away
            if own is _ABSENT:
                delattr(holder, name)  # the class of the object, or a base class, has it
            else:
                setattr(holder, name, own)

    def _stand_in(self, make: Callable[[Any], Any], function: Any) -> Any:
        ours = make(function)

        @functools.wraps(function)
        def stand_in(*arguments: Any, **named: Any) -> Any:
            return (ours if self._on else function)(*arguments, **named)

        return stand_in
