"""The shadow step: a process that replaces a lost one first computes a step as another rank, and is compared with that
rank.

State that a script keeps in plain variables, caches, hooks and files is in no checkpoint, and a new process does not
have it. `loop_carried` finds much of that in the script's text, but not all. So before a new process's gradients count,
it runs the block of its first step as a rank that has already trained: with that rank's samples and random numbers, and
with the tracked state that the new process was given. Collectives are not run. The block is left before the first
optimizer's step if no code after it would notice; otherwise it runs to its end. Then everything is put back, and the
process takes the step as itself. If its gradients differ from those of the other rank in that step, the run is refused
on all ranks before anything is saved (ADR 0018). Missing state may show later (a counter that reaches a threshold), so
the process takes further shadow steps in its 3rd, 5th, 9th, … step. If its program was rehearsed, it takes none in the
run's steps that were rehearsed, and behind them none in its first step, for which the others wait longest (ADR 0053).
Its plain values are compared in each of these steps.

DDP's forward pass sends rank 0's buffers to all ranks, but not in a shadow step. So rank 0 sends them before each step
in which a process takes a shadow step.

The process keeps its own rank, because a script may remember its rank, and may write files by it. A script that asks
for its rank may compute other gradients on purpose, and is not refused for them.

Invariants: a shadow step leaves no tracked state changed. All members compare in the same step, or none does.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import Any

import torch

from everstep.checkpoint.state.alike import to_bytes
from everstep.recovery.errors import LoopError
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.members import Members
from everstep.recovery.group.script_location import script_call_site
from everstep.train.guards.comparison.local_gradients import LocalGradients, is_own, pack, unpack
from everstep.train.guards.leavable_block import may_be_left
from everstep.train.guards.plain_values import Values, differences, listed, remedy, untracked_values
from everstep.train.guards.script_objects import Name, variables, walk

log = logging.getLogger("everstep.train")

MOST_BUFFERS = 2**26  # bytes that rank 0 sends in a step with a shadow step
MOST = 1000  # collectives that end with this rank's own values, in a shadow step that cannot be left


class ShadowStepOver(PeerLost):
    """Raised to end a shadow step. No peer is lost, but the step's block is left as if one were."""


class ShadowStep:
    """The shadow steps of one process. `stand_in`: see `ProgramGroups.stand_in`; None and None end that. `buffers`: the
    buffers that a forward pass takes from rank 0, by name. `may_differ`: whether a value of this name may differ
    between processes. `rehearsed`: steps of a rehearsal of its program; 0 if there was none.
    `carried`: the names that the loop carries and that are not tracked."""

    def __init__(
        self,
        state: Mapping[str, Any],
        members: Members,
        stand_in: Callable[[Callable[[str], bool] | None, Callable[[], None] | None], None],
        buffers: Callable[[], Mapping[str, torch.Tensor]] = dict,
        may_differ: Callable[[str], bool] = lambda _: False,
        rehearsed: int = 0,
        carried: Mapping[str, Name] = MappingProxyType({}),
    ) -> None:
        self._state = state
        self._members = members
        self._rehearsed = rehearsed
        self._stand_in = stand_in
        self._buffers = buffers
        self._may_differ, self._carried = may_differ, carried
        self._brought = b""  # rank 0's buffers, for a step with a shadow step
        self._age = 0  # steps that this process has completed, one after the other
        self._ages: list[int] = []  # of the members, by rank
        self._model: int | None = None  # the rank to be compared with in the next step; None: nothing is compared
        self._left = 0  # first steps of this process without a shadow step, because its program was rehearsed
        self._lefts: list[int] = []  # those of the members, by rank
        self._computes = False  # whether a member takes a shadow step in the next step
        self._due = False  # whether this process takes it
        self._foreign = False  # whether a step has asked other ranks for their values
        self._may_be_left = False  # whether the block of the shadow step may be left
        self._stood_in = 0  # collectives of others' values in the shadow step
        self._knows_rank = False  # whether a shadow step has asked for the rank, and may have kept it
        self.playing = False
        self._gradients: LocalGradients | None = None
        self._totals: torch.Tensor | None = None
        self._first: Values | None = None  # the script's values before this process's first step
        self._values: Values = {}
        self._warned = set[str]()  # values that the log has named
        self._caches: list[functools._lru_cache_wrapper[Any]] = []  # the script's caches, when a shadow step is due
        self._empty: list[functools._lru_cache_wrapper[Any]] = []  # those of them that were empty before
        self._missed: dict[int, int] = {}  # misses of each cache before the first shadow step, by identity

    def prepare(self) -> None:
        """Read the script's text and values once, before this process is in a round. What a process reads for the first
        time takes four times as long, and in its first step the others wait for it."""
        may_be_left(sys._getframe(1))
        untracked_values(sys._getframe(1), self._state, self._carried)

    def agree(self, *, joins: bool, step: int) -> None:
        """Agree on the next shadow step, when the members of a round have the same state, that of `step`. `joins`: this
        process was given it. Collective."""
        if joins:
            self._age, self._left = 0, self._leaves_out(step)
        by_rank = self._members.gather((self._age, int(self._foreign), self._left))
        self._ages = [age for age, _, _ in by_rank]
        self._lefts = [left for _, _, left in by_rank]
        self._foreign = any(foreign for _, foreign, _ in by_rank)
        self._plan()

    def _leaves_out(self, step: int) -> int:
        """Steps of a process that joins at `step` in which it takes no shadow step."""
        if step < self._rehearsed:
            return self._rehearsed - step
        # Of a later step the caches that the script fills cannot be taken back.
        return 1 if self._rehearsed and not caches(sys._getframe(1)) else 0

    def _plan(self) -> None:
        self._forget()
        oldest = max(self._ages)
        due = [age < oldest and is_compared(age, left) for age, left in zip(self._ages, self._lefts, strict=True)]
        values = [age < oldest and is_compared(age, 0) for age in self._ages]
        compared = [gradients or plain for gradients, plain in zip(due, values, strict=True)]
        self._model = self._ages.index(oldest) if any(compared) else None
        self._computes, self._due = any(due), due[self._members.rank]
        self._brought = b""
        if self._computes and (buffers := self._buffers()):
            mine = pack_tensors(buffers, MOST_BUFFERS) if self._members.rank == 0 else b""
            self._brought = self._members.from_rank(0, mine)

    @property
    def first(self) -> bool:
        """Whether this process has completed no step yet. Then all members' reducers are new."""
        return self._age == 0

    def is_due(self, can_renew: Callable[[], bool]) -> bool:
        """Whether this process takes a shadow step in the step that begins. `can_renew`: whether DDP's reducers can be
        made like the others' again after it."""
        if self._due and not self._buffers_fit():
            self.cannot("the buffers of its modules are too large to be sent, or of other sizes than rank 0's")
        if self._due and not can_renew():
            self.cannot("DDP's buckets could not be made anew behind it (static_graph, or a process group of its own)")
        if self._due:
            self._may_be_left = may_be_left(sys._getframe(1))
            self._caches = caches(sys._getframe(1))
            if not self.first and any(c.cache_info().misses > self._missed.get(id(c), 0) for c in self._caches):
                self.cannot("its steps fill a cache of functools, from which its values could not be taken out")
            if self._foreign and not self._may_be_left:
                self.cannot("its steps have collectives of the script's own, and code behind their blocks")
        return self._due

    def _buffers_fit(self) -> bool:
        own = self._buffers()
        return not own or (bool(self._brought) and fits(self._brought, own))

    @property
    def model(self) -> int:
        """The rank with which the shadow step is compared."""
        assert self._model is not None
        return self._model

    def cannot(self, why: str) -> None:
        """Take no shadow step in this process, for the reason `why`."""
        if self._age == self._left:
            log.warning(
                "the gradients of this new process are not compared with those of a rank that has trained: %s. The "
                "script's plain values are", why,
            )  # fmt: skip
        self._due = False

    def begin(self) -> int | None:
        """Begin a step. Return the rank as which it is taken, if that is not this process's own."""
        is_new = self._first is None
        if self._first is None:
            self._first = untracked_values(sys._getframe(1), self._state, self._carried)
        if self._model is None or self._gradients is not None:
            return None
        if self._age < max(self._ages) or self._members.rank == self._model:
            now = self._first if is_new else untracked_values(sys._getframe(1), self._state, self._carried)
            self._values = now
        if not (self._due or (self._computes and self._members.rank == self._model)):
            return None
        self._gradients = LocalGradients(self._state)
        self._gradients.begin()
        if not self._due:
            return None
        self.playing, self._due, self._stood_in = True, False, 0
        self._empty = [cache for cache in self._caches if not cache.cache_info().currsize]
        if self.first:
            self._missed = {id(c): c.cache_info().misses for c in self._caches if c.cache_info().currsize}
        if self._brought:
            unpack_tensors(self._brought, self._buffers())
        self._stand_in(self._stands_in, self._in_group)
        return self._model

    def collective(self, name: str) -> None:
        """Note that a collective begins in a step that is no shadow step."""
        if self.playing:
            return
        if self._gradients is not None:
            self._gradients.collective(name)
        # The caller of a broadcast is looked up only in the 1st, 2nd, 4th, … step, because that takes longest.
        if not self._foreign and (name != "broadcast" or not self._age & (self._age - 1)):
            self._foreign = not is_own(name)

    def _stands_in(self, name: str) -> bool:
        assert self._gradients is not None
        own = self._gradients.collective(name)
        self._stood_in += not own
        self._foreign = self._foreign or not own
        if not own and (self._may_be_left or self._stood_in > MOST):
            raise ShadowStepOver(f"{name} brings what another rank has")
        return True

    def asks_rank(self) -> None:
        """Note that the script asks for its rank."""
        self._knows_rank = self._knows_rank or (self.playing and self._totals is None)

    def _in_group(self) -> None:
        caller = script_call_site(sys._getframe(1))
        if caller is not None and (not caller.function or caller.function.startswith("get_")):
            self.asks_rank()

    def update(self, _: torch.optim.Optimizer, closure: bool) -> None:
        """Look at an optimizer before its step. With a `closure` the step has yet to compute gradients. Raises
        `ShadowStepOver`."""
        if closure:
            return
        if self._gradients is not None and self._totals is None:
            self._end_counting()
        if self.playing and self._may_be_left:
            raise ShadowStepOver("the shadow step is over")

    def leaves(self, error: BaseException) -> bool:
        """Whether the script goes on after the block of the shadow step, which has just ended."""
        return isinstance(error, PeerLost) or self._may_be_left

    def over(self) -> None:
        """End a step's block."""
        if self._gradients is not None and self._totals is None:
            self._end_counting()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which collectives are replaced."""
        self._stand_in(lambda _: True, None)
        try:
            yield
        finally:
            self._stand_in(None, None)

    def ended(self, error: BaseException | None) -> None:
        """End the shadow step: this process is itself again. `error`: the script's error that ended it, if any."""
        self.playing = False
        self._stand_in(None, None)
        if error is not None:
            log.warning(
                "the shadow step as rank %s ended with %r: this new process is not compared", self._model, error
            )
            self._totals = None

    def forget_cached(self) -> None:
        """Clear the caches that were empty before the shadow step. Otherwise a mask cached by the step's number would
        be the other rank's in this process's own step."""
        for cache in self._empty:
            cache.cache_clear()
        self._empty = []

    def compare(self) -> None:
        """Compare after the step, before anything is saved. Collective. Raises `LoopError` on all members."""
        if self._model is not None:
            self._compare(self._model)
        self._age += 1
        self._ages = [age + 1 for age in self._ages]
        self._plan()

    def _compare(self, model: int) -> None:
        members, mine = self._members, self._totals
        is_model = members.rank == model
        data = members.from_rank(model, pack(mine, {"values": self._moved()}) if is_model else b"")
        refused = ""
        theirs, head = unpack(data)
        differing = differences(head["values"], self._values, self._may_differ)
        if not is_model and mine is not None and self._gradients is not None:
            name = self._gradients.first_difference(mine, theirs) if theirs is not None else None
            if name is not None and model != 0 and self._buffers() and bool((mine[:, 0] > 1).any()):
                # A second forward pass of the step takes rank 0's buffers again, as rank 0's first pass has left them.
                log.info("%s has other gradients than on rank %s; but its buffers are rank 0's", name, model)
            elif name is not None and self._knows_rank:
                log.warning(
                    "this new process is not compared: %s has other gradients than on rank %s, but the step asks for "
                    "its rank, which may be why%s. Ask for the rank behind the block (`if step.completed and run.rank "
                    "== 0:` before a print), so that the next new process is compared",
                    name, model, f". Of the script's variables these differ: {listed(differing)}" if differing else "",
                )  # fmt: skip
            elif name is not None:
                refused = _refusal(name, members.rank, model, self._age, self._left, differing)
        if not refused and not is_model:
            self._warn(model, differing)
        verdicts = members.gather((int(bool(refused)),))
        worst = next((rank for rank, (bad,) in enumerate(verdicts) if bad), None)
        if worst is not None:
            raise LoopError(members.from_rank(worst, refused.encode()).decode())

    def _moved(self) -> Values:
        """The values that have changed since this process's first step. Others are the same in all processes, or are
        of the rank."""
        return {name: value for name, value in self._values.items() if (self._first or {}).get(name) != value}

    def _warn(self, model: int, differing: list[str]) -> None:
        new = [difference for difference in differing if difference.partition(" (")[0] not in self._warned]
        self._warned |= {difference.partition(" (")[0] for difference in new}
        if new:
            log.warning(
                "rank %d is a new process, and of the values that the script's steps change these are not those of "
                "rank %d: %s. %s", self._members.rank, model, listed(new), remedy(new),
            )  # fmt: skip

    def _end_counting(self) -> None:
        assert self._gradients is not None
        self._gradients.end()
        self._totals = self._gradients.totals()

    def _forget(self) -> None:
        if self._gradients is not None:
            self._gradients.end()
        self._gradients, self._totals, self._values = None, None, {}


def is_compared(age: int, left: int) -> bool:
    """Whether a process that has completed `age` steps is compared in its next one; in its first `left` steps it is
    not. A step right behind one that was compared would show nothing new."""
    return age == left or (age > left + 1 and not age & (age - 1))


def caches(frame: FrameType | None) -> list[functools._lru_cache_wrapper[Any]]:
    """The script's functions under `functools.cache` or `lru_cache`."""
    values = (named.value for named in walk(variables(frame)))
    return [value for value in values if isinstance(value, functools._lru_cache_wrapper)]


def pack_tensors(tensors: Mapping[str, torch.Tensor], most: int) -> bytes:
    """The tensors' kinds and bytes; nothing if they have more than `most` bytes."""
    if sum(t.numel() * t.element_size() for t in tensors.values()) > most:
        return b""
    head = json.dumps({name: _kind(t) for name, t in tensors.items()}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(bytes(to_bytes(t)) for t in tensors.values())


def fits(data: bytes, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether `unpack_tensors` can fill these tensors."""
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return list(head.items()) == [(name, _kind(t)) for name, t in tensors.items()]


def unpack_tensors(data: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors from the result of `pack_tensors` for others of the same kinds."""
    at = 8 + int.from_bytes(data[:8], "little")
    with torch.no_grad():
        for tensor in tensors.values():
            size = tensor.numel() * tensor.element_size()
            if size:
                part = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8)
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            at += size


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _refusal(name: str, rank: int, model: int, age: int, left: int, differing: list[str]) -> str:
    saved = "Nothing was saved since it came"
    if age and age == left:
        saved = (
            f"It came {age} step{'s' if age > 1 else ''} ago, and its gradients were not compared until now, because "
            "the script was rehearsed: commits since then may hold wrong parameters"
        )
    elif age:
        equal = next(before for before in range(age - 1, -1, -1) if is_compared(before, left))
        saved = (
            f"It came {age} steps ago, and its gradients were still equal {age - equal} steps ago: commits since "
            "then may hold wrong parameters"
        )
    text = (
        f"rank {rank} is a new process, and it computes other gradients than rank {model} from the same samples, "
        f"random numbers and tracked state: {name} has others. So the step reads something that a new process does not "
        f"have. {saved}"
    )
    if differing:
        text += f". Of the script's variables these differ: {listed(differing)}"
    return (
        f"{text}. {remedy(differing)}. If the machines compute that differently, or the step reads RANK from the "
        "environment on purpose, write everstep.start(…, compare_gradients=False)"
    )
