"""Injects faults between a client and the cluster, explicitly and reproducibly.

A `Faults` has rules, each with a fault and the requests that it strikes. A client consults it before every request and
for every event of a watch. Random numbers are drawn only for rules with a chance below 1, from the `random.Random` that
was passed in. Invariant: faults show only what a real network and server can show. A lost answer follows a write that
happened, no event is invented, and a reordered event belongs to the same watch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from everstep_local.apiserver.refusals import Refusal
from everstep_operator.kube.resources import Resource


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait `seconds` of the cluster's clock before the request, or before the event is delivered."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """The server answers with this error and does nothing; `retry_after` in seconds."""

    code: int
    reason: str = ""
    message: str = "injected"
    retry_after: float | None = None

    def refusal(self) -> Refusal:
        return Refusal(self.code, self.reason, self.message, retry_after=self.retry_after)


@dataclass(frozen=True, slots=True)
class Disconnect:
    """No connection: nothing happened, `ConnectionFailed`. In a watch: the stream fails, after all earlier events."""


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The request is carried out, its answer is lost: `ConnectionFailed`."""


@dataclass(frozen=True, slots=True)
class Stale:
    """A get or list sees the state of `versions` changes ago, as from an API server that is behind."""

    versions: int


@dataclass(frozen=True, slots=True)
class Break:
    """A watch ends inside a line: `StreamBroken`."""


@dataclass(frozen=True, slots=True)
class Expire:
    """The history of a watch, or of the request that opens it, is forgotten: `Gone`."""


@dataclass(frozen=True, slots=True)
class Drop:
    """An event is not delivered, as if the server had lost it."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """An event is delivered twice."""


@dataclass(frozen=True, slots=True)
class Swap:
    """An event is delivered after the one that follows it."""


RequestFault: TypeAlias = Delay | Refuse | Disconnect | LoseAnswer | Stale | Expire
EventFault: TypeAlias = Delay | Disconnect | Break | Expire | Drop | Duplicate | Swap
Fault: TypeAlias = RequestFault | EventFault


@dataclass(frozen=True, slots=True)
class Request:
    """A request as rules see it. `verb`: get, list, watch, create, patch, replace, delete, review; "event" for an event
    of a watch. `name`: that of the object; may be empty."""

    verb: str
    plural: str
    namespace: str = ""
    name: str = ""


@dataclass(slots=True, eq=False)
class Rule:
    """One fault and the requests that it strikes. Empty fields match everything. `left`: how often it may still strike;
    None: always."""

    fault: Fault
    verbs: frozenset[str] = frozenset()
    plural: str = ""
    namespace: str = ""
    name: str = ""
    chance: float = 1.0
    skip: int = 0
    left: int | None = None
    struck: int = 0

    def matches(self, request: Request) -> bool:
        return (
            (not self.verbs or request.verb in self.verbs)
            and self.plural in ("", request.plural)
            and self.namespace in ("", request.namespace)
            and self.name in ("", request.name)
        )


@dataclass(slots=True)
class Faults:
    """The faults of one client, or of several that share them. `rng` is needed for rules with a chance below 1."""

    rng: random.Random | None = None
    rules: list[Rule] = field(default_factory=list)
    _listeners: list[Callable[[], None]] = field(default_factory=list)
    _cut: bool = False

    def add(
        self,
        fault: Fault,
        *verbs: str,
        resource: Resource[Any] | None = None,
        namespace: str = "",
        name: str = "",
        chance: float = 1.0,
        skip: int = 0,
        times: int | None = None,
    ) -> Rule:
        """Add a rule for requests with one of `verbs` (none: any). It skips `skip` matching requests, and strikes
        `times` times (None: always).

        Raises ValueError for a chance without a random number generator.
        """
        if not 0 <= chance <= 1 or (chance < 1 and self.rng is None):
            raise ValueError(
                f"chance: {chance} must be from 0 to 1, and below 1 only with Faults(rng=random.Random(…))"
            )
        plural = resource.plural if resource is not None else ""
        rule = Rule(fault, frozenset(verbs), plural, namespace, name, chance, skip, times)
        self.rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        """End a rule. It is no error if the rule has ended already."""
        if rule in self.rules:
            self.rules.remove(rule)

    @property
    def is_cut(self) -> bool:
        return self._cut

    def cut(self) -> None:
        """Cut the network: open watches fail, and every request raises ConnectionFailed."""
        self._cut = True
        for wake in self._listeners:
            wake()

    def heal(self) -> None:
        """Restore the network. Rules stay as they are."""
        self._cut = False

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` on every cut, until the returned function is called."""
        self._listeners.append(wake)
        return lambda: self._listeners.remove(wake)

    def strike(self, request: Request) -> list[Fault]:
        """The faults that strike `request`, in the order of the rules."""
        struck: list[Fault] = []
        for rule in tuple(self.rules):
            if not rule.matches(request):
                continue
            if rule.skip > 0:
                rule.skip -= 1
                continue
            if rule.chance < 1:
                assert self.rng is not None
                if self.rng.random() >= rule.chance:
                    continue
            rule.struck += 1
            struck.append(rule.fault)
            if rule.left is not None:
                rule.left -= 1
                if rule.left <= 0:
                    self.rules.remove(rule)
        return struck
