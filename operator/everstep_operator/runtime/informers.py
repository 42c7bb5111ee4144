"""Informers of one resource, one for each namespace that is watched, read as if they were one.

Rights that a Role grants end at its namespace, so a list of all namespaces would be refused. Invariant: what is read is
sorted by (namespace, name), as of one informer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from everstep_operator.kube.wire import KubeObject
from everstep_operator.runtime.informer import Handler, Informer

T = TypeVar("T", bound=KubeObject)
EVERYWHERE = None  # in place of a namespace


class Informers(Generic[T]):
    def __init__(self, namespaces: tuple[str, ...], make: Callable[[str | None], Informer[T]]) -> None:
        """`make`: of one namespace, or of `EVERYWHERE`, which is watched where none is named."""
        self._of: Mapping[str | None, Informer[T]] = {name: make(name) for name in sorted(namespaces) or (EVERYWHERE,)}

    def of(self, namespace: str | None) -> Informer[T]:
        """The informer of that namespace, which is watched; `EVERYWHERE` where all are."""
        return self._of[namespace]

    def watches(self, namespace: str | None) -> bool:
        return namespace in self._of

    def get(self, namespace: str, name: str) -> T | None:
        informer = self._of.get(namespace) or self._of.get(EVERYWHERE)
        return informer.get(namespace, name) if informer is not None else None

    def list(self) -> tuple[T, ...]:
        return tuple(obj for informer in self._of.values() for obj in informer.list())

    def by_index(self, index: str, value: str) -> tuple[T, ...]:
        return tuple(obj for informer in self._of.values() for obj in informer.by_index(index, value))

    def add_handler(self, handler: Handler[T]) -> None:
        for informer in self._of.values():
            informer.add_handler(handler)
