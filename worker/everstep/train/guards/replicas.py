"""Refuses a loop whose ranks train apart: unaveraged gradients raise no error, and each rank drifts away. Also refuses
a loop whose ranks have their own buffers or tracked values, which are lost with their process.

The ranks compare the bytes of their parameters after the 1st, 2nd, 4th, 8th, … step of a world, after the last, and
before each save, so that no commit is made of ranks that differ. They compare again because a learning rate that begins
at zero, or a gradient scaler that skips its first steps, hides a drift for a while. A loop that averages its gradients
itself stays equal, and passes. If `DistributedDataParallel` has averaged the gradients, a drift comes from something
else that differs between ranks, such as a counter that starts again in a new process. Parts made by `fully_shard` or
FSDP are each rank's own, and are not compared. Buffers that DDP does not broadcast are compared too, and so are tracked
values and objects that may differ (a replay buffer, a rank's own first loss): after a restart all ranks get those of
rank 0. In a step that is compared at its end, the parameters at its beginning and the gradients with which the first
optimizer steps are noted, so that a refusal says since when the ranks differ, and which of them. This module knows no
process group: its caller says how ranks compare a number. Invariant: ranks compare at the same steps, and raise
together.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from everstep.checkpoint.state.alike import first_bytes
from everstep.checkpoint.state.capture import capture
from everstep.checkpoint.state.modules import bare
from everstep.checkpoint.state.sharding import is_sharded
from everstep.recovery import digests
from everstep.recovery.errors import LoopError
from everstep.recovery.rollback.tracked_objects import ELSEWHERE
from everstep.recovery.state.optimizers import before_step
from everstep.recovery.state.randomness import Gather
from everstep.recovery.state.shape import Shape
from everstep.torch_private.modules import buffers_of
from everstep.torch_private.reducers import has_rebuilt_buckets
from everstep.torch_private.sharded import is_flat
from everstep.train.guards.remedies import OF_A_RANK

log = logging.getLogger("everstep.train")

BYTES = 2**16  # of each tensor: a drift shows everywhere
TENSORS = 256


class Replicas:
    """Make it once the script has built the tracked `state` and `parallel`, the DDP objects of this process. `is_free`:
    whether a value with this name may be lost. Buffers matter only if something is `kept` for other processes.
    `frees`: whether the script has a run whose `untracked` names what may be lost."""

    def __init__(
        self,
        state: Mapping[str, Any],
        parallel: Collection[DistributedDataParallel],
        is_free: Callable[[str], bool] = lambda _: False,
        *,
        kept: bool = True,
        shape: Shape | None = None,
        frees: bool = True,
    ) -> None:
        self._shape = shape or Shape()
        self._frees, self._parallel = frees, weakref.WeakSet(parallel)
        parallels = {id(p) for ddp in parallel for p in cared_for(ddp)}
        own = [(name, p) for name, p in _trainable(state) if id(p) not in parallels][:TENSORS]
        # Parameters that tensor parallelism has sharded, or keeps whole on each rank of a replica: DDP does not average
        # them.
        self._cut = [(name, p) for name, p, cut in _by_tensor(state, self._shape) if cut][:TENSORS]
        whole = [(name, p) for name, p, cut in _by_tensor(state, self._shape) if not cut][:TENSORS]
        self._own: list[tuple[str, torch.Tensor]] = [*own, *whole]
        self._averaged = [(name, p) for name, p in _trainable(state) if id(p) in parallels][:TENSORS]
        # Buffers are kept by module, because a forward pass may replace a buffer by another.
        # DDP broadcasts no buffer either if it was made when all of them were None.
        apart = [ddp for ddp in parallel if kept and not (ddp.broadcast_buffers and ddp.modules_buffers)]
        self._apart = [m for ddp in apart for m in ddp.module.modules() if buffers_of(m)]
        self._were_none = all(ddp.broadcast_buffers for ddp in apart)
        if kept and self._shape.readers > 1:
            inside = {id(m) for ddp in parallel for m in ddp.module.modules()}
            tracked = (m for t in state.values() if isinstance(t, torch.nn.Module) for m in bare(t).modules())
            self._apart += [m for m in tracked if id(m) not in inside]
        self._values = {key: target for key, target in state.items() if kept and is_plain(key, target)}
        self._schedules = {key: target for key, target in state.items() if isinstance(target, LRScheduler)}
        self._names = _names(state)
        self._is_free = is_free
        self._steps, self._compared = 0, -1  # steps of this world: all, and those after which ranks compared last
        # Of each compared parameter in the present step: a digest at the beginning, and one of its gradient.
        self._before = list[int]()
        self._gradients = list[int]()
        for target in state.values():
            if isinstance(target, torch.optim.Optimizer):
                before_step(target, self._updates)

    def moved(self) -> None:
        """Tell of a new world, whose members begin with equal parameters."""
        self._steps, self._compared = 0, -1

    def begins(self) -> None:
        """Begin a step."""
        self._before, self._gradients = [], []
        if not (self._steps + 1) & self._steps:
            self._before = [_digest([p]) for _, p in self._whole]

    def _updates(self, *_: Any) -> None:
        """An optimizer is about to step."""
        if self._before and not self._gradients:
            gradients = (getattr(p, "grad", None) for _, p in self._whole)
            self._gradients = [0 if gradient is None else _digest([gradient]) for gradient in gradients]

    @property
    def _whole(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._own, *self._averaged]

    def completed(
        self, world_size: int, same: Callable[[int], bool], gather: Gather | None = None, *, last: bool = False
    ) -> None:
        """Compare after a step that is complete on all ranks. `same`: whether all ranks have this number of 63 bits.
        `gather`: the number of each rank. Both are collective. `last`: no step follows. Raises `LoopError` if the
        ranks' parameters differ."""
        self._steps += 1
        if last or not self._steps & (self._steps - 1):
            self._compare(world_size, same, gather)

    def before_save(self, world_size: int, same: Callable[[int], bool], gather: Gather | None = None) -> None:
        """Compare as `completed` does, unless the ranks have compared after the newest step. Collective."""
        if self._compared != self._steps:
            self._compare(world_size, same, gather)

    def _compare(self, world_size: int, same: Callable[[int], bool], gather: Gather | None) -> None:
        size = self._shape.model_size  # places hold different things, so all of them compare
        has_any = self._own or self._averaged or self._apart or self._values or self._cut or size > 1
        if not has_any or world_size == 1:
            return
        of_all = same
        if size > 1 and gather is not None:
            same = _same_by_place(gather, size)
        if self._apart or size > 1:
            self._compare_buffers(same)
        self._compare_values(of_all)
        if self._shape.readers > size and gather is not None:
            self._compare_shards(gather)
        if same(_digest(p for _, p in self._whole)):
            self._compared = self._steps
            return
        differing = self._first_of(self._whole, same)
        since = self._since(gather) if size == 1 and gather is not None else ""
        if any(not ddp.require_backward_grad_sync for ddp in self._parallel):
            raise LoopError(
                f"after step {self._steps} of this world its {world_size} ranks hold different parameters, {differing} "
                f"among them{since}: the step was taken inside of `with model.no_sync():`, so no gradients were "
                "averaged. Accelerate's LocalSGD is such a block. A commit would hold the parameters of one rank. "
                "Leave LocalSGD out (or pass enabled=False), and call the last backward() of a step outside of "
                "no_sync()"
            )
        if schedules := self._schedules_apart(same):
            evaluation = "a function of run.evaluate" if self._frees else "an evaluation"
            raise LoopError(
                f"after step {self._steps} of this world its {world_size} ranks hold different parameters, {differing} "
                f"among them{since}: {schedules} is in another state on each rank, so the ranks learn at different "
                "rates. Its step() was given a value that differs between ranks, such as a rank's own loss, or was not "
                f"called on all. Call it on all ranks with the mean of all, in the step or in {evaluation}: "
                "`loss = loss.detach(); dist.all_reduce(loss); loss /= dist.get_world_size()`, then step(loss)"
            )
        if not self._own or same(_digest(p for _, p in self._own)):
            raise LoopError(
                f"after step {self._steps} of this world its {world_size} ranks hold different parameters, {differing} "
                f"among them{since}, though DistributedDataParallel averages their gradients: "
                "something that training depends on is not the same on all ranks. In a process that replaces a "
                "lost one the script's own variables have the values of the script's start (a counter that sets a "
                "learning rate, the best loss so far, a copy of weights): keep them in a dictionary that is tracked, "
                "`kept = {'count': 0}` and run.track(kept=kept) before the loop, or compute them from step.number. "
                "With Trainer or Lightning keep them in attributes of a callback or module: numbers, texts, lists"
            )
        if size > 1:
            raise LoopError(
                f"after step {self._steps} of this world the replicas differ: ranks with the same place in their "
                f"replica (there are {size} places) hold different parameters"
                f"{''.join(f', {n} among them' for n, _ in self._own[:1])}. Their gradients are not averaged: write "
                "`run.average_gradients(model)` after the last backward() of a step, before the gradients are read"
            )
        if self._shape.readers > 1:
            raise LoopError(
                f"after step {self._steps} of this world its {world_size} ranks hold different parameters. One of "
                f"those that each rank holds whole ({self._own[0][0]} is the first) has gradients that are not "
                f"averaged, or that differ between the {self._shape.readers} ranks of a replica. Write "
                "run.average_gradients(model) after the last backward() of a step, give layers that see only a part "
                "of the sequence to SequenceParallel(), and let no random number or branch depend on run.rank"
            )
        raise LoopError(
            f"after step {self._steps} of this world its {world_size} ranks hold different parameters, "
            f"{differing} among them{since}: their gradients are not averaged. Wrap the module before the loop, "
            "`model = DistributedDataParallel(model)`, and call the wrapped module, also if the world has one process "
            "now and may grow later; or average the gradients in each step"
        )

    def _since(self, gather: Gather) -> str:
        """Which ranks differ, and since when, in brackets for a refusal; each rank logs its digests. Raises a
        `LoopError` that is not certain if the ranks turn out to be equal. Collective."""
        after = [_digest([p]) for _, p in self._whole]
        phases = (self._before, self._gradients, after)
        has_rebuilt = all(map(has_rebuilt_buckets, self._parallel))
        rows = gather(tuple(map(len, phases)))
        if any(length not in (0, len(after)) for row in rows for length in row) or len(set(rows)) > 1:
            return ""  # ranks have other parameters, or not all of them have stepped
        by_rank = gather([number for phase in phases for number in phase])
        first, second = len(phases[0]), len(phases[0]) + len(phases[1])
        before = [row[:first] for row in by_rank]
        gradients = [row[first:second] for row in by_rank]
        now = [row[second:] for row in by_rank]
        log.error(
            "digest of this rank's parameters when step %d began: %s; of the gradients with which its first optimizer "
            "stepped: %s; of its parameters now: %s; DDP's buckets laid out by arrival: %s",
            self._steps, *map(_short, phases), "yes" if has_rebuilt else "no",
        )  # fmt: skip
        differing = _columns_apart(now)
        if not differing:
            raise LoopError(
                f"after step {self._steps} of this world its ranks were found to hold different parameters, and at a "
                "second look all of them held the same. Something writes into parameters between two steps, or a "
                "comparison failed. The log has each rank's digests; please report it with them",
                certain=False,
            )
        most, count = Counter(now).most_common(1)[0]
        odd = [str(rank) for rank, row in enumerate(now) if row != most]
        who = f"rank{'s'[: len(odd) - 1]} {', '.join(odd)} apart from the others" if count > 1 else "on each rank"
        if _columns_apart(before):
            when = ", different when the step began"
        elif gradients[0] and (apart := _columns_apart(gradients)):
            when = f", as were {apart} of the gradients with which the optimizer stepped"
        elif gradients[0]:
            when = ", though the optimizer stepped with the same gradients: its settings differ, as a learning rate may"
        else:
            when = ""
        return f" ({differing} of {len(after)}, {who}{when})"

    def _compare_shards(self, gather: Gather) -> None:
        """Compare the replicas shard by shard."""
        shards = self._shape.readers
        by_rank = gather((_digest(p for _, p in self._cut),))
        if len({(rank % shards, digest) for rank, (digest,) in enumerate(by_rank)}) > shards:
            raise LoopError(
                f"after step {self._steps} of this world its {len(by_rank) // shards} replicas hold different "
                f"parameters. The gradients of their shards ({self._cut[0][0]} is the first) are not averaged: write "
                "`run.average_gradients(model)` after the last backward() of a step, before the gradients are read"
            )

    def _compare_values(self, same: Callable[[int], bool]) -> None:
        """Compare tracked dictionaries, lists, tensors, and objects that are neither modules nor torch's own."""
        compared = {key: target for key, target in self._values.items() if not self._is_free(key)}
        digests_by_name = {key: _digest_of_values(key, target) for key, target in compared.items()}
        if same(xxhash.xxh3_64_intdigest(repr(sorted(digests_by_name.items())).encode()) >> 1):
            return
        if not same(xxhash.xxh3_64_intdigest(repr(sorted(digests_by_name)).encode()) >> 1):
            return  # ranks track different objects: the save, or a new member, reports that
        names = [key for key, digest in sorted(digests_by_name.items()) if not same(digest)]
        parts = [part for name in names for part in _parts_that_differ(name, compared[name], same)]
        kept = ", ".join(name for name, _ in parts)
        is_tensor = any(isinstance(part, torch.Tensor | np.ndarray) for _, value in parts for part in _leaves(value))
        of_place = (
            "; or, if it belongs to the part of the model that one place of a replica holds, make it a buffer of a "
            "tracked torch.nn.Module, which is saved for each place"
            if self._shape.model_size > 1
            else ""
        )
        raise LoopError(
            f"after step {self._steps} of this world the ranks have different values of {kept}, which is tracked: a "
            "new process, and each rank of a run that is started again, would get one rank's value. Make it the same "
            "on all ranks: compute it from step.number, or, if it is a sum or a mean (a loss, a norm), use "
            f"dist.all_reduce in the step on what goes into it{self._or_lost(*names)}{of_place}"
            f"{f'. {OF_A_RANK}' if is_tensor else ''}"
        )

    def _schedules_apart(self, same: Callable[[int], bool]) -> str:
        """The schedules whose states differ between ranks, with their classes; empty if there are none, or if ranks
        have different schedules. Collective."""
        schedules = sorted(self._schedules.items())
        if not same(xxhash.xxh3_64_intdigest(repr([key for key, _ in schedules]).encode()) >> 1):
            return ""
        apart = [(key, target) for key, target in schedules if not same(_digest_of_values(key, target))]
        return ", ".join(f"{key} ({type(target).__name__})" for key, target in apart)

    def _compare_buffers(self, same: Callable[[int], bool]) -> None:
        """Compare the buffers of DDP with `broadcast_buffers=False`. Buffers that change alike on all ranks pass."""
        buffers = [(self._name(m, k), b) for m in self._apart for k, b in buffers_of(m).items() if b is not None]
        compared = [(name, b) for name, b in buffers if not self._is_free(name)]
        if same(_digest(b for _, b in compared)):
            return
        name = self._first_of(compared, same) if compared else "a buffer"
        if self._shape.readers > 1:
            raise LoopError(
                f"after step {self._steps} of this world the ranks have different values of {name}: the buffers of a "
                "model that is divided over run.mesh() are not made the same in all replicas. A replica's own values "
                "are lost with it, and commits do not hold them. Use a layer without such a buffer (LayerNorm instead "
                f"of BatchNorm){self._or_lost(name)}"
            )
        if self._were_none:
            raise LoopError(
                f"after step {self._steps} of this world the ranks have different values of {name}, which was None "
                "when its DistributedDataParallel was made, so that it is not made the same on all ranks: a rank's own "
                "value is lost with its process, and commits do not hold it. Give it a value before the module is "
                "wrapped, `register_buffer(name, torch.zeros(…))`; or compute it with dist.all_reduce"
                f"{self._or_lost(name)}"
            )
        raise LoopError(
            f"after step {self._steps} of this world the ranks have different values of {name}, because its "
            "DistributedDataParallel was made with broadcast_buffers=False: a rank's own values are lost with its "
            "process, and commits do not hold them. Leave broadcast_buffers=False out, and all ranks get rank 0's; or "
            "use torch.nn.SyncBatchNorm, which computes one value from the batches of all ranks"
            f"{self._or_lost(name)}"
        )

    def _first_of(self, tensors: Sequence[tuple[str, torch.Tensor]], same: Callable[[int], bool]) -> str:
        """The name of the first one that differs, found by halves on all ranks alike. Different places have different
        tensors, so there it is the first of all. Collective."""
        while len(tensors) > 1 and self._shape.model_size == 1:
            half = tensors[: len(tensors) // 2]
            tensors = tensors[len(half) :] if same(_digest(t for _, t in half)) else half
        return tensors[0][0]

    def _or_lost(self, *names: str) -> str:
        if not self._frees:
            return ""
        listed = ", ".join(map(repr, names))
        return f"; or, if the training does not depend on it and it may be lost: run.untracked({listed})"

    def _name(self, module: torch.nn.Module, key: str) -> str:
        return f"{self._names.get(id(module), type(module).__name__)}.{key}"


def _same_by_place(gather: Gather, size: int) -> Callable[[int], bool]:
    def same(number: int) -> bool:
        by_rank = gather((number,))
        return len({(rank % size, other) for rank, (other,) in enumerate(by_rank)}) == size

    return same


def _digest(tensors: Iterable[torch.Tensor]) -> int:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if not is_lazy(tensor):
            digest.update(first_bytes(digests.local(tensor), BYTES))
    return digest.intdigest() >> 1


def _columns_apart(by_rank: Sequence[Sequence[int]]) -> int:
    """At how many places the ranks' numbers differ."""
    return sum(len(set(column)) > 1 for column in zip(*by_rank, strict=True))


def _short(numbers: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(tuple(numbers)).encode())[:8] if numbers else "not noted"


def _parts_that_differ(key: str, target: Any, same: Callable[[int], bool]) -> list[tuple[str, Any]]:
    """The entries of a tracked dictionary that differ between ranks, each with its name; the whole object if it is no
    dictionary, or if ranks have other keys. Collective."""
    parts = list(target.items())[:TENSORS] if isinstance(target, dict) else []
    keys = xxhash.xxh3_64_intdigest(repr([part for part, _ in parts]).encode()) >> 1
    if not same(keys):
        return [(key, target)]
    differing = [(f"{key}[{part!r}]", value) for part, value in parts if not same(_digest_of_values(key, {"": value}))]
    return differing or [(key, target)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def _digest_of_values(key: str, target: Any) -> int:
    captured = capture({key: target}, 0)
    digest = xxhash.xxh3_64(json.dumps(captured.values, sort_keys=True).encode())
    for name, tensor in sorted(captured.tensors.items()):
        digest.update(f"{name} {_digest([tensor])}".encode())
    return digest.intdigest() >> 1


def is_plain(key: str, target: Any) -> bool:
    """Whether nothing else keeps this value alike on all ranks: it is neither torch's own, nor made for one rank, nor
    the session's."""
    if isinstance(target, dict | list | np.ndarray):
        return True
    if isinstance(target, torch.Tensor):
        return not (target.requires_grad or is_sharded(target))
    if isinstance(target, torch.nn.Module | torch.optim.Optimizer | LRScheduler | torch.amp.GradScaler):
        return False
    if key in ELSEWHERE or getattr(target, "everstep_per_rank", False) or digests.settles_itself(target):
        return False
    return callable(getattr(target, "load_state_dict", None))


def _names(state: Mapping[str, Any]) -> dict[int, str]:
    """The names of the tracked modules and their parts, by identity."""
    modules = ((key, bare(value)) for key, value in state.items() if isinstance(value, torch.nn.Module))
    return {id(m): f"{key}.{path}" if path else key for key, module in modules for path, m in module.named_modules()}


def cared_for(ddp: Any) -> Iterator[torch.nn.Parameter]:
    """The parameters that DDP averages: all that it does not leave to other hooks."""
    for name, p in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield p


def _trainable(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of tracked modules that are whole on each rank."""
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            for name, p in value.named_parameters():
                # FSDP's flat parameters are each rank's own part.
                if p.requires_grad and not is_sharded(p) and not is_flat(p):
                    yield f"{key}.{name}", p


def _by_tensor(state: Mapping[str, Any], shape: Shape) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The tracked modules' DTensors, if tensor parallelism has made them, and whether a rank has only a part."""
    for key, value in state.items() if shape.readers > 1 else ():
        if isinstance(value, torch.nn.Module):
            for name, p in value.named_parameters():
                if is_sharded(p):
                    yield f"{key}.{name}", p, any(placement.is_shard() for placement in p.placements)  # type: ignore[attr-defined]
