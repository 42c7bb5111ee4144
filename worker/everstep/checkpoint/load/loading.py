"""Loads a commit into the live state: the newest whole one, or the requested one.

Knows nothing of writing. Invariants: what does not fit is refused before anything is changed, unless only an object's
own `load_state_dict` can find out; a load that fails leaves no mark, because that is no fault of the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from everstep.checkpoint.errors import CheckpointError, Damaged, Fenced, StateMismatch
from everstep.checkpoint.format.manifest import CommitRecord, OpenRecord
from everstep.checkpoint.handle import Events
from everstep.checkpoint.load.fit import Fit, fit, tensors_of
from everstep.checkpoint.load.restoring import Guard, candidates, newest_whole, requested_commit
from everstep.checkpoint.load.selection import LoadReport, Selection
from everstep.checkpoint.load.targets import of_all_ranks
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.loads import LoadMark
from everstep.checkpoint.log.opening import Settings
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.state.capture import Captured, apply, capture, parameters_of
from everstep.checkpoint.state.holders import Holders
from everstep.checkpoint.state.layouts import row_of, same_bits, shows_twice, span
from everstep.checkpoint.state.sharding import local_of, placed_as
from everstep.checkpoint.state.tree import DTYPES
from everstep.checkpoint.state.union import inside
from everstep.contract import refusal
from everstep.storage import ObjectStore, StorageError

# --- casting
# Refuses a load with `cast=True` that would turn a number of the commit into another value. Rounding is what a narrower
# type is for. A finite number that becomes infinite, a fraction that becomes whole, or an integer that wraps around is
# another value. Invariant: such a load is refused on every rank, before the objects are filled.


def check_cast(
    state: Mapping[str, Any], captured: Captured, fitted: Fit, tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Raises `StateMismatch` naming the tensors of the commit with a number that the state's dtype cannot represent. If
    it raises on one rank, it raises on all. Collective."""
    odd = []
    for own, name, dtype in sorted(set(_conversions(state, captured, fitted)), key=lambda conversion: conversion[:2]):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype != dtype and (what := _lost(local_of(tensor), dtype)) is not None:
            kinds = f"{DTYPES.get(tensor.dtype)} in the commit"
            odd.append(f"{own}: {kinds}, and {what} does not exist in {DTYPES.get(dtype)}, the state's")
    if ranks.maximum(int(bool(odd))):
        text = "; ".join(odd[:3]) or "a tensor cannot be converted on another rank, which names it"
        raise StateMismatch(f"cast: {text}. Give the state a type that has it, or leave this out with exclude=")


def _conversions(state: Mapping[str, Any], captured: Captured, fitted: Fit) -> Iterator[tuple[str, str, torch.dtype]]:
    """The path in the state, the name of the commit's tensor, and the dtype that it is converted to."""
    for name, owns in fitted.live.items():
        yield from ((own, name, captured.tensors[own].dtype) for own in owns)
    for key, body in fitted.bodies.items():
        if not isinstance(inside(state[key]), torch.optim.Optimizer):
            continue
        parameters = parameters_of(state, key, body)
        for number, names in tensors_of(body).items():
            parameter = parameters.get(number)
            if parameter is not None and parameter.is_floating_point():
                # The step is not converted to the parameter's type.
                yield from ((name, name, parameter.dtype) for name in names if not name.endswith("/step"))


def _lost(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """The first number of `tensor` that `dtype` cannot represent, as a text; None if it can represent all, rounded."""
    wide = tensor.flatten()
    if wide.is_complex() and not dtype.is_complex:
        bad = wide.imag != 0
    elif dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32 if dtype.itemsize < 4 else dtype
        bad = _comparable(wide).isfinite() & ~wide.to(dtype).to(kind).isfinite()
    else:
        bad = _comparable(wide) != _comparable(wide.to(dtype).to(wide.dtype))
    return str(wide[bad][0].item()) if bool(bad.any()) else None


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a type that torch can compare: it cannot compare all float8 and unsigned ones."""
    if tensor.is_floating_point() and tensor.element_size() < 4:
        return tensor.float()
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.to(torch.int64)
    return tensor


# --- wholeness
# Whether the script's state is of one step: a restore that is cut off leaves parts of two steps. If such a mixture were
# saved, the commit would be of a step that never existed, and the next run would go on from it. Invariant: after the
# first change by a restore, no save of the keys that it changes is accepted until a restore of them has succeeded.


class Wholeness:
    def __init__(self) -> None:
        self._loads = False  # a restore is running
        self._torn: list[tuple[frozenset[str], Selection]] = []  # what restores have begun to change and not finished

    @contextmanager
    def loading(self, state: Collection[str], chosen: Selection) -> Iterator[Callable[[], None]]:
        """The time of a restore of this state. Call the function that it gives before the first change. Until then
        nobody has checked that the state is a mapping."""
        if self._loads:
            raise CheckpointError(
                "restore() is called while another restore() of this Checkpointer is under way, as by a handler of "
                "signals: call it after that one has returned"
            )
        self._loads = True
        try:
            yield lambda: self._torn.append((frozenset(state), chosen))
            done = frozenset(state), chosen
            self._torn = [torn for torn in self._torn if not _covers(done, torn)]
        finally:
            self._loads = False

    def vouched(self) -> None:
        """The caller guarantees that the state is whole now."""
        self._torn = []

    def problem(self, step: int, keys: Collection[str]) -> CheckpointError | None:
        """Why a state with these keys must not be saved; None if it may be."""
        if self._loads:
            return CheckpointError(
                f"step {step} was not saved: restore() is under way, and the state may hold parts of two steps. A "
                "handler of signals that comes within restore() must not save: the commits are as they were, and the "
                "next start restores the newest"
            )
        if not self._torn:
            return None
        torn = sorted({key for changed, _ in self._torn for key in changed} & set(keys))
        if not torn:
            return None
        return CheckpointError(
            f"step {step} was not saved: a restore() was cut off by an error while it changed the state, so "
            f"{', '.join(torn[:8])} may hold parts of two steps. Call restore() again until it succeeds, or end the "
            "process: its next start restores the newest commit"
        )


def _covers(done: tuple[frozenset[str], Selection], torn: tuple[frozenset[str], Selection]) -> bool:
    return done[0] >= torn[0] and (done[1].whole or done[1] == torn[1])


# --- ties
# Memory of a state for which a commit has two values: weights that were not tied when they were saved and are now, and
# tensors that overlap. In dicts and lists one of the tensors is replaced (see `refilling`). Modules, and tensors that
# are values of the state themselves, are filled in place, and the last value would win. Invariant: for these, two
# different values for one memory are an error.


def check_ties(
    live: Mapping[str, Sequence[str]], captured: Captured, tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Raises `StateMismatch` if memory of a module, or of a tensor that is a value of the state itself, would get two
    values: from several of the commit's tensors that go into one live tensor, or through live tensors that overlap. If
    it raises on one rank, it raises on all, before anything is filled. Collective. `live`: by each of the commit's
    tensors, the live ones that it goes into."""
    sources: dict[str, list[str]] = {}
    for name in sorted(live.keys() & tensors.keys()):
        for own in live[name]:
            sources.setdefault(own, []).append(name)
    odd = []
    for own in sorted(sources.keys() & captured.filled):
        first, *others = sources[own]
        known = local_of(tensors[first])
        for name in others:
            tensor = local_of(tensors[name])
            if known.shape == tensor.shape and known.dtype == tensor.dtype and not same_bits(known, tensor):
                odd.append(
                    f"{own}: is tied in the state passed, and the commit holds {first} and {name} with different values"
                )
    memory = {own: local_of(captured.tensors[own]) for own in sources if own in captured.filled | captured.refilled}
    for names, begin, end in _heaps(memory):
        if captured.filled.isdisjoint(names):
            continue
        given = {own: _Given.of(captured.tensors[own], tensors[sources[own][0]]) for own in names}
        odd += [
            f"{left} and {right}: overlap in memory in the state passed, and the commit holds different values there"
            for left, right in _clashes({own: g for own, g in given.items() if g is not None}, begin, end)
            if {left, right} & captured.filled
        ]
    if ranks.maximum(int(bool(odd))):
        text = "; ".join(odd[:3]) or "tied tensors would get two values on another rank, which names them"
        raise StateMismatch(f"{text}. Nothing was changed. Untie them, or leave all but one out with exclude=")


@dataclass(frozen=True, slots=True)
class _Given:
    """A live tensor's memory, and the bytes that are to be loaded into it, element by element."""

    memory: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, live: torch.Tensor, loaded: torch.Tensor) -> _Given | None:
        """None if the memory is not simply filled with `loaded`: a module may convert it."""
        if live.shape != loaded.shape or not live.numel() or shows_twice(local_of(live).shape, local_of(live).stride()):
            return None
        memory, value = local_of(live), local_of(placed_as(live, loaded)).to(live.dtype)
        value = value.conj() if memory.is_conj() else value
        return cls(memory, row_of(-value if memory.is_neg() else value))

    def within(self, buffer: torch.Tensor, begin: int) -> torch.Tensor:
        """The view of this tensor in `buffer`, which stands for the memory from address `begin` on."""
        size = self.memory.element_size()
        steps = (*(step * size for step in self.memory.stride()), 1)
        return buffer.as_strided((*self.memory.shape, size), steps, self.memory.data_ptr() - begin)

    def is_lost_to(self, other: _Given) -> bool:
        """Whether this tensor's bytes are overwritten when `other` is filled after it."""
        (begin, end), (first, last) = span(self.memory), span(other.memory)
        if begin >= last or first >= end:
            return False
        begin = min(begin, first)
        buffer = torch.zeros(max(end, last) - begin, dtype=torch.uint8)
        self.write(buffer, begin)
        other.write(buffer, begin)
        return not self.is_in(buffer, begin)

    def write(self, buffer: torch.Tensor, begin: int) -> None:
        into = self.within(buffer, begin)
        into.copy_(self.rows.view(into.shape))

    def is_in(self, buffer: torch.Tensor, begin: int) -> bool:
        there = self.within(buffer, begin)
        return torch.equal(there, self.rows.view(there.shape))


def _clashes(given: Mapping[str, _Given], begin: int, end: int) -> list[tuple[str, str]]:
    """The pairs of names whose memory, between these addresses, overlaps and cannot hold both values."""
    buffer = torch.zeros(end - begin, dtype=torch.uint8)
    for filling in given.values():
        filling.write(buffer, begin)
    # Of two that clash, at least one is overwritten. Only for these the other one is searched.
    lost = [name for name in given if not given[name].is_in(buffer, begin)]
    pairs = ((loser, other) for loser in lost for other in given if other != loser)
    return sorted({(min(p), max(p)) for p in pairs if given[p[0]].is_lost_to(given[p[1]])})


def _heaps(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[list[str], int, int]]:
    """The groups of two or more tensors whose spans overlap one after the other: their names, begin and end."""
    heap: list[str] = []
    first = reach = 0
    for begin, end, name in [*sorted((*span(t), n) for n, t in tensors.items() if t.numel()), (-1, -1, "")]:
        if heap and 0 <= begin < reach:
            heap.append(name)
            reach = max(reach, end)
            continue
        if len(heap) > 1:
            yield heap, first, reach
        heap, first, reach = [name], begin, end


# --- loading

logger = logging.getLogger("everstep.checkpoint")

OVERTAKEN: Final = "a newer run has taken the log while this one restored"


def put_into(
    state: Mapping[str, Any], captured: Captured, record: CommitRecord, tensors: dict[str, torch.Tensor], ranks: Ranks,
    chosen: Selection, *, whole: bool,
) -> LoadReport:  # fmt: skip
    """Put the tensors and values of a commit into the state; returns what was left out. Collective."""
    assert isinstance(record.values, dict)
    fitted = fit(state, captured, record, ranks.rank, chosen)
    check_ties(fitted.live, captured, tensors, ranks)
    if chosen.cast:
        check_cast(state, captured, fitted, tensors, ranks)
    answers = apply(state, record.values, tensors, ranks.rank, whole=whole, bodies=fitted.bodies)
    fitted.judged(answers, chosen)
    return fitted.report()


class Loader:
    """The loads of one Checkpointer, and which commits they found unusable."""

    def __init__(self, store: ObjectStore, log: CommitLog, settings: Settings, events: Events) -> None:
        self._store, self._log, self._settings, self._events = store, log, settings, events
        self.mark = LoadMark(store)
        self._whole = Wholeness()
        self.report = LoadReport()  # of the newest load
        self.damaged: set[int] = set()
        self.suspected: set[int] = set()  # commits that are whole, but earlier runs that loaded them died

    def move(self) -> None:
        """Go on in another world, whose members have a whole state, or get one."""
        self.mark.give_up()
        self._whole.vouched()

    def torn(self, step: int, state: Mapping[str, Any]) -> CheckpointError | None:
        """The error if the state after `step` may be a mixture of two steps."""
        return self._whole.problem(step, state)

    def load(
        self, state: Mapping[str, Any], own: OpenRecord, ranks: Ranks, chosen: Selection, *, holders: Holders,
        step: int | None, n: int | None, idle: Callable[[], object], end: Callable[[], int],
    ) -> CommitRecord | None:  # fmt: skip
        """Fill `state`, and return the commit; None if there is none. Collective. `holders` have agreed on the unions
        of this state. `idle` waits for this run's own saves. Commits below record `end()` are tried."""
        with self._whole.loading(state, chosen) as changes:
            captured = capture(state, ranks.rank)  # a state that cannot be saved is refused now, not at the first save
            holders.check_cuts(captured, ranks)
            wanted = partial(of_all_ranks, state, captured, ranks, bool(holders.unions), selection=chosen)
            idle()
            passed: list[str] = []

            def rejected(n: int, reason: str, *, suspected: bool = False) -> None:
                if not suspected and (fenced := self._log.overtaken(own)) is not None:
                    raise fenced
                stepped_over(n, reason, suspected=suspected)

            def unreadable(n: int, reason: str, *, suspected: bool = False) -> None:
                fenced = self._log.overtaken(own)
                if ranks.maximum(int(fenced is not None)):
                    raise fenced or Fenced(OVERTAKEN)
                stepped_over(n, reason, suspected=suspected)

            def stepped_over(n: int, reason: str, *, suspected: bool) -> None:
                passed.append(reason)
                (self.suspected if suspected else self.damaged).add(n)
                logger.error("log record %d is stepped over: %s", n, reason)
                self._events("stepped-over", n=n, error=reason)

            self.mark.begin(own)
            guard = Guard(self.mark, self._settings.max_loads, self._settings.nonfinite)
            named = step is not None or n is not None
            try:
                tried = (  # used on rank 0
                    requested_commit(Catalog(self._store), guard, step, n)
                    if named
                    else candidates(self._log, end, guard, rejected)
                )
                loaded = newest_whole(self._store, ranks, wanted, tried, unreadable, changes)
                self.report = LoadReport()
                if loaded is not None:
                    self.report = put_into(state, captured, *loaded, ranks, chosen, whole=chosen.whole)
            except (CheckpointError, StorageError, KeyboardInterrupt) as e:
                self.mark.failed()
                if isinstance(e, CheckpointError) and refusal.find(e) is None:
                    fenced = e if isinstance(e, Fenced) else self._log.overtaken(own)
                    if fenced is not None:
                        self._events("fenced", error=fenced)
                        raise fenced from (None if fenced is e else e)
                if named and passed and isinstance(e, CheckpointError):
                    raise Damaged(f"{self._store.url}: {passed[-1]}") from e
                raise
            self.mark.loaded(None if loaded is None else loaded[0].step, ranks.rank)
            return None if loaded is None else loaded[0]
