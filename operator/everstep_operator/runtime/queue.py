"""A work queue of keys: many events about one object become one piece of work.

Invariants: a key is ready at most once. It is never given to two workers at the same time: if it is added while being
worked on, it becomes ready again at `done`. Of several delays for one key the earliest wins. A key with news does not
wait for all routine keys. The queue holds at most `limit` distinct keys. `KeyQueue` is pure (time is an argument);
`WorkQueue` adds the waiting. This follows client-go's workqueue, which keeps delays and back-off in separate layers.
Here one state holds all, so that one model tests all.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from everstep_operator.kube.backoff import Backoff
from everstep_operator.runtime.clock import Clock, wait_event
from everstep_operator.runtime.errors import QueueFull
from everstep_operator.runtime.randomness import Random

K = TypeVar("K", bound=Hashable)

LIMIT = 100_000
RECENT = 30.0  # seconds: keys whose news are at most this old when work begins are worked on first
ROUTINE_SHARE = 8  # one in so many taken keys is routine, if there is any: news must not delay routine keys for ever
BACKOFF = Backoff(base=0.05, cap=60.0)


class KeyQueue(Generic[K]):
    """The state machine. All times are seconds of one monotonic clock and never decrease from call to call."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._ready: deque[K] = deque()
        self._queued: set[K] = set()  # the keys in _ready
        self._routine: dict[K, None] = {}  # keys that are ready without news, in order
        self._since_routine = 0  # keys taken since the last routine one
        self._working: set[K] = set()
        self._again: set[K] = set()  # added while being worked on
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # may hold superseded entries; _due decides
        self._sequence = 0

    def __len__(self) -> int:
        """The number of ready keys. Keys in work and keys that wait for a delay are not counted."""
        return len(self._ready) + len(self._routine)

    def add(self, key: K, *, routine: bool = False) -> None:
        """Make `key` ready now. A pending delay of it is dropped, because this work will cover it.

        `routine`: nothing is known to have happened to it, so keys with news come first.
        """
        if key in self._queued or key in self._again or (routine and key in self._routine):
            return
        if key in self._routine:
            del self._routine[key]
        else:
            self._check_capacity(key)
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif routine:
            self._routine[key] = None
        else:
            self._queued.add(key)
            self._ready.append(key)

    def add_after(self, key: K, delay: float, now: float) -> None:
        """Make `key` ready at `now + delay`, unless it is ready or due earlier anyway."""
        if delay <= 0:
            self.add(key)
            return
        if key in self._queued or key in self._again or key in self._routine:
            return
        due = now + delay
        if key in self._due and self._due[key] <= due:
            return
        self._check_capacity(key)
        self._due[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._compact()

    def take(self, now: float) -> K | None:
        """The next ready key, which is then in work until `done`; None if nothing is ready at `now`."""
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                self.add(key)
        if self._routine and (not self._ready or self._since_routine >= ROUTINE_SHARE - 1):
            key = next(iter(self._routine))
            del self._routine[key]
            self._since_routine = 0
        elif self._ready:
            key = self._ready.popleft()
            self._queued.discard(key)
            self._since_routine += 1
        else:
            return None
        self._working.add(key)
        return key

    @property
    def news(self) -> tuple[K, ...]:
        """The keys with news, in order: ready ones, and keys in work to which something happened meanwhile."""
        return (*self._ready, *self._again)

    def clear(self) -> None:
        """Drop every key but those that are being worked on."""
        for keys in (self._ready, self._queued, self._routine, self._again, self._due, self._heap):
            keys.clear()

    def done(self, key: K) -> None:
        """The work on `key` ended; if it was added meanwhile it is ready again."""
        if key not in self._working:
            raise ValueError(f"done({key!r}) without take: it is not being worked on")
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._queued.add(key)
            self._ready.append(key)

    def next_due(self) -> float | None:
        """When the next delayed key becomes ready, if any is delayed."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _check_capacity(self, key: K) -> None:
        if key in self._due or key in self._working:
            return
        count = len(self._queued) + len(self._routine) + len(self._working) + len(self._due)
        # A key in work may also have a delay. So distinct keys are counted, but only near the limit.
        if count >= self._limit and count - len(self._working & self._due.keys()) >= self._limit:
            raise QueueFull(
                f"work queue holds {self._limit} keys, cannot add {key!r}; raise its limit or shard the keys"
            )

    def _compact(self) -> None:
        # Superseded entries are dropped lazily. Without this the heap would grow while one key is added again and
        # again.
        if len(self._heap) > 2 * len(self._due) + 16:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)


class WorkQueue(Generic[K]):
    """A `KeyQueue` that workers wait on, with back-off by key."""

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        *,
        backoff: Backoff = BACKOFF,
        limit: int = LIMIT,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_wait` gets the seconds from a key's first news to the moment when it is taken."""
        self._on_wait = on_wait
        self._added: dict[K, float] = {}  # when the first news of a key came that nobody has taken yet
        self._clock = clock
        self._rng = rng
        self._backoff = backoff
        self._keys: KeyQueue[K] = KeyQueue(limit)
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()
        self._paused = False
        self._news: dict[K, float] = {}  # while paused: when each key was added last, in order

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: K, *, routine: bool = False) -> None:
        """Make `key` ready now, after those with news if it is `routine`. Raises `QueueFull` at the limit."""
        if self._paused:
            self._note(key)
        else:
            self._keys.add(key, routine=routine)
            self._added.setdefault(key, self._clock.monotonic())
            self._wake.set()

    def add_after(self, key: K, delay: float) -> None:
        """Make `key` ready in `delay` seconds; of several delays the earliest wins. Raises `QueueFull`."""
        if not self._paused:
            self._keys.add_after(key, delay, self._clock.monotonic())
            self._wake.set()

    def add_backoff(self, key: K, *, at_least: float = 0.0) -> float:
        """Count a failure of `key` and make it ready after its back-off; the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = max(at_least, self._backoff.delay(failures, self._rng()))
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """`key` succeeded: its next failure starts the back-off anew."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key; it is this caller's until `done`."""
        while True:
            now = self._clock.monotonic()
            key = self._keys.take(now)
            if key is not None:
                if (added := self._added.pop(key, None)) is not None:
                    self._on_wait(now - added)
                return key
            due = self._keys.next_due()
            self._wake.clear()
            await wait_event(self._clock, self._wake, None if due is None else due - now)

    def done(self, key: K) -> None:
        """The work on `key` ended, well or not."""
        self._keys.done(key)
        self._wake.set()

    def pause(self) -> None:
        """Workers stop taking keys. Until `resume` only the news of the last moments are kept."""
        self._paused = True
        for key in self._keys.news:
            self._note(key)
        self._keys.clear()
        self._added.clear()
        self._failures.clear()

    def resume(self) -> None:
        """Begin with those news. The caller adds all other keys."""
        self._paused = False
        oldest = self._clock.monotonic() - RECENT
        for key in [key for key, at in self._news.items() if at >= oldest]:
            self.add(key)
        self._news.clear()

    def _note(self, key: K) -> None:
        now = self._clock.monotonic()
        self._news.pop(key, None)
        self._news[key] = now
        while len(self._news) > LIMIT or next(iter(self._news.values())) < now - RECENT:
            del self._news[next(iter(self._news))]
