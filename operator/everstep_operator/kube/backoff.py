"""Exponential back-off as a value. It is pure: the randomness is an argument.

Only the upper half is random: `delay` lies in [d/2, d] for d = base * factor^attempt, capped. So a thousand clients do
not come back together, and none comes back at once (the "equal jitter" of M. Brooker's "Exponential Backoff And
Jitter", 2015).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`base` and `cap` in seconds; attempt 0 is the first retry."""

    base: float
    cap: float
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not (0 < self.base <= self.cap and self.factor >= 1):
            raise ValueError(f"back-off needs 0 < base <= cap and factor >= 1, got {self}")

    def ceiling(self, attempt: int) -> float:
        """The longest wait before retry number `attempt`, in seconds."""
        delay = self.base
        for _ in range(attempt):
            delay *= self.factor
            # Return early: a power of a large attempt would overflow a float.
            if delay >= self.cap:
                return self.cap
        return delay

    def delay(self, attempt: int, unit: float) -> float:
        """The wait before retry number `attempt`, in seconds; `unit` is uniform in [0, 1)."""
        return self.ceiling(attempt) * (0.5 + 0.5 * unit)
