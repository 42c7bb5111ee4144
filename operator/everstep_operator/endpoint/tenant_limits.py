"""Limits how much of the operator a pod, its job and its namespace may use. Pure.

There are two rules. *Shares* limit what a tenant uses at the same time: at most a part of the free amount. So there
is always some free for the next tenant, and a single tenant may hold much (dynamic thresholds: Choudhury and Hahne,
IEEE/ACM Transactions on Networking 6(2), 1998). *Rates* are token buckets. A job's part is twice its pod's, and a
namespace's twice its job's. So a pod at its limit leaves room for the other pods of its job, and a job for the other
jobs of its namespace. Invariants: no entry remains for a tenant that has given everything back; memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

# The part of the free amount that each level may hold: namespace, job, pod.
PARTS = (1.0, 0.5, 0.25)
# The multiple of a pod's rate and burst that each level has: namespace, job, pod.
MULTIPLES = (4.0, 2.0, 1.0)
MAX_BUCKETS = 50_000

Level: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tenant:
    """`job` is a job's UID. It is empty for pods without a job; those of a namespace share as if they were one job."""

    namespace: str
    job: str
    pod: str

    @property
    def levels(self) -> tuple[Level, Level, Level]:
        """The keys of namespace, job and pod, which are unique."""
        return ((self.namespace,), (self.namespace, self.job), (self.namespace, self.job, self.pod))


class Shares:
    """`total` of something that tenants use for a time: calls, waiting checks, bytes."""

    def __init__(self, total: float) -> None:
        self._total, self.used = total, 0.0
        self._used_by: dict[Level, float] = {}

    def reserve(self, tenant: Tenant, amount: float = 1.0) -> bool:
        """Whether the tenant may hold that much more. If so, it holds it until `release`."""
        free = self._total - self.used
        if amount > free:
            return False
        for level, part in zip(tenant.levels, PARTS, strict=True):
            used = self._used_by.get(level, 0.0)
            if used and used + amount > part * free:
                return False
        self.used += amount
        for level in tenant.levels:
            self._used_by[level] = self._used_by.get(level, 0.0) + amount
        return True

    def release(self, tenant: Tenant, amount: float = 1.0) -> None:
        self.used -= amount
        for level in tenant.levels:
            remaining = self._used_by[level] - amount
            if remaining > 0:
                self._used_by[level] = remaining
            else:
                del self._used_by[level]

    @contextmanager
    def reserved(self, tenant: Tenant, amount: float = 1.0) -> Iterator[bool]:
        """`reserve`, and `release` at the end. False: it was not given."""
        granted = self.reserve(tenant, amount)
        try:
            yield granted
        finally:
            if granted:
                self.release(tenant, amount)

    def __len__(self) -> int:
        """How many tenants hold something, at all levels."""
        return len(self._used_by)


class Rates:
    """A pod has `rate` per second and `burst` at once; its job and namespace have a multiple of both."""

    def __init__(self, rate: float, burst: float, multiples: tuple[float, ...] = MULTIPLES) -> None:
        self._rate, self._burst, self._multiples = rate, burst, multiples
        self._levels: OrderedDict[Level, tuple[float, float]] = OrderedDict()  # the balance, and its time

    def spend(self, tenant: Tenant, amount: float, now: float, patience: float = 0.0) -> float | None:
        """Seconds to wait until the amount may be used. None: that is more than `patience`, and nothing was spent.

        A full bucket allows an amount larger than a burst, which is paid for afterwards. `now`: monotonic seconds.
        """
        balances = [
            (level, m, self._balance(level, m, now)) for level, m in zip(tenant.levels, self._multiples, strict=True)
        ]
        wait = max(max(0.0, -balance) / (self._rate * m) for _, m, balance in balances)
        if wait > patience:
            return None
        for level, _, balance in balances:
            self._levels[level] = (balance - amount, now)
            self._levels.move_to_end(level)
        self._forget(now)
        return wait

    def _forget(self, now: float) -> None:
        """Drop the oldest buckets if they are full again: they hold no information. Drops more than a call adds."""
        for _ in range(len(self._multiples) + 1):
            level = next(iter(self._levels), None)
            if level is None:
                return
            multiple = self._multiples[len(level) - 1]
            if len(self._levels) <= MAX_BUCKETS and self._balance(level, multiple, now) < self._burst * multiple:
                return
            del self._levels[level]

    def _balance(self, level: Level, multiple: float, now: float) -> float:
        full = self._burst * multiple
        balance, at = self._levels.get(level, (full, now))
        return min(full, balance + (now - at) * self._rate * multiple)

    def __len__(self) -> int:
        return len(self._levels)
