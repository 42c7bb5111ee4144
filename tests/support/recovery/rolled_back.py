"""Training scripts of many shapes, and members of a job that run them in one process.

Each rank computes the same, so a collective changes nothing: what a member ends with is what it would have alone. So
each member reads the batches of all ranks of its world. A peer is lost at a collective of one's choice, or between two
steps. `Member` does between its steps what `everstep.train.recovering_world` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from everstep.checkpoint.state.capture import apply, capture
from everstep.data import ElasticLoader
from everstep.data.plan.assignment import World
from everstep.recovery.digests import content, state_digests
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.rollback.rollback import Rollback
from everstep.recovery.transfer.agreement import MemberState, NoState, agree
from everstep.recovery.validity import Validity
from everstep.train.feeding.feed import Feed, feed_of

STEPS = 9
BETWEEN = 0  # in place of a collective's number, from 1
OPTIMIZERS = ("sgd", "adamw", "sam", "lbfgs", "gan", "ppo")
LOADERS = ("plain", "distributed", "weighted", "elastic")
RANKS, SHARE = 3, 2  # processes that the job is built for, samples of each in a step
# The last batch of an epoch is smaller, and no rank's share of it is empty: a batch of weight 0 would stand for that.
DATA = TensorDataset(torch.randn(22, 3, generator=torch.Generator().manual_seed(0)), torch.arange(22))
PLACES = ("start", "before", "after", "tail", "between")  # of the optimizer's step; "tail": after a collective


@dataclass(frozen=True)
class Shape:
    """A script. `…_at`: a place in the step; `…_every`: in every so many steps."""

    optimizer: str = "sgd"  # adamw, sam, lbfgs, gan, ppo
    schedule: str = ""  # each, epoch, hand
    schedule_at: str = "after"
    ema: str = ""  # counted, data, shadow, clones
    ema_at: str = "after"
    ema_every: int = 1
    counter_at: str = ""
    counter_every: int = 1
    scaler: bool = False
    overflows: int = 0  # in every so many steps
    micro: int = 1
    clip: bool = False
    norm: bool = False  # BatchNorm, and a buffer that forward replaces
    tails: int = 0  # collectives behind the optimizer
    tails_every: int = 1
    metric: bool = False  # a collective before the optimizer
    zero_at: str = "start"
    to_none: bool = True
    unused: bool = False  # a parameter that every third step uses
    catches: bool = False
    asks: bool = True  # whether a step is completed, before what follows the block
    accumulates: int = 1  # session steps an optimizer's step
    large: bool = False  # nothing is small enough to be copied
    loader: str = ""  # of `LOADERS`; without one a step's numbers follow from its own
    autocast: bool = False


def possible(shape: Shape) -> Shape:
    """Without what torch itself refuses: a scaler takes no closure, and unscales once an optimizer's step. And without
    what ADR 0016 says is not seen: `.data` in some steps only, none of which is watched."""
    if shape.optimizer in ("lbfgs", "sam"):
        shape = replace(shape, scaler=False)
    return replace(shape, ema_every=1) if shape.ema == "data" else shape


class Net(torch.nn.Module):
    seen: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.a = torch.nn.Linear(3, 4)
        self.b = torch.nn.Linear(4, 1)
        self.rare = torch.nn.Parameter(torch.ones(1))
        self.norm = torch.nn.BatchNorm1d(4) if shape.norm else torch.nn.Identity()
        if shape.norm:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        if self.shape.norm:
            self.seen = self.seen + x.detach().mean()
        y: torch.Tensor = self.b(torch.relu(self.norm(self.a(x))))
        y = y * self.rare if self.shape.unused and number % 3 == 0 else y
        return y


class Shadow:
    """An average as people write it; `clones`: its `state_dict` copies."""

    def __init__(self, model: torch.nn.Module, clones: bool) -> None:
        self.model, self.clones = model, clones
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()

    def state_dict(self) -> dict[str, Any]:
        return {name: t.clone() if self.clones else t for name, t in self.shadow.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: t.clone() for name, t in state.items()}


class SAM(torch.optim.Optimizer):
    """Two passes a step; github.com/davda54/sam, shortened."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * 0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.data = self.state[p].pop("old_p")  # what stays would share the parameter's memory, here and not there
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has two halves instead
        raise NotImplementedError

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Member:
    """One process. `lose`: at this collective of this step a peer is lost."""

    def __init__(self, shape: Shape, seed: int) -> None:
        torch.manual_seed(seed)
        self.shape, self.number, self.failures = shape, 0, 0
        self.lose: tuple[int, int] | None = None
        self.called: list[int] = []  # collectives of each step
        self.lost = False
        self.model = Net(shape)
        self.state: dict[str, Any] = {"model": self.model}
        parameters = list(self.model.parameters())
        self.optimizers = self._optimizers(parameters)
        for i, optimizer in enumerate(self.optimizers):
            self.state[f"optimizer{i}"] = optimizer
        main = self.optimizers[0]
        if shape.schedule in ("each", "epoch"):
            self.state["schedule"] = torch.optim.lr_scheduler.ExponentialLR(main, 0.9)
        if shape.scaler:
            self.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        if shape.ema in ("counted", "data"):
            self.state["ema"] = Net(shape).requires_grad_(False)
            self.state["ema"].load_state_dict(self.model.state_dict())
        elif shape.ema:
            self.state["ema"] = Shadow(self.model, shape.ema == "clones")
        if shape.counter_at:
            self.state["counter"] = {"n": 0, "seen": [torch.zeros(2)]}
        self.feeds = [_feed(shape.loader, seed, rank, RANKS) for rank in range(RANKS)] if shape.loader else []
        if self.feeds:
            self.state["data"] = self.feeds[0].saved
        self.rollback = Rollback(self.state, self.check)

    def _optimizers(self, parameters: list[torch.nn.Parameter]) -> list[Any]:
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        match self.shape.optimizer:
            case "adamw":
                return [torch.optim.AdamW(parameters, lr=0.1)]
            case "lbfgs":
                return [torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)]
            case "sam":
                sam = SAM(parameters, torch.optim.SGD, **options)
                return [sam.base_optimizer, sam]
            case "gan":
                return [torch.optim.SGD(parameters[:2], **options), torch.optim.AdamW(parameters[2:], lr=0.1)]
            case _:
                return [torch.optim.SGD(parameters, **options)]

    def check(self) -> None:
        if self.lost:
            raise PeerLost("a peer is gone")

    def collective(self, tensor: torch.Tensor) -> None:
        self.rollback.collective("allreduce", [tensor])
        self.called[-1] += 1
        if self.lose == (self.number, self.called[-1]):
            self.lose, self.lost = None, True
        if self.lost:
            self.failures += 1
            raise PeerLost("a peer is gone")

    def run(self, until: int) -> Validity | None:
        """Train until then; sooner, and what the state is worth, if a peer is lost."""
        while self.number < until:
            self.rollback.begin(self.number)
            self.called.append(0)
            self._take()
            before, caught = self.failures + self.rollback.refused, True
            try:
                self.step()
            except PeerLost:
                assert self.lost
                caught = False
            if self.failed(before, caught):
                self._over(False)
                return self.rollback.roll_back()
            self.rollback.ended()
            self._over(True)
            if self.lose == (self.number - 1, BETWEEN):
                self.lose, self.lost = None, True
                return Validity.WHOLE
        return None

    def failed(self, before: int, caught: bool) -> bool:
        """Whether a collective of the step has failed, or an optimizer was refused its step; `before`: so many by then.
        `caught`: the script has kept the error to itself, which changes nothing."""
        return self.failures + self.rollback.refused > before

    def _over(self, counts: bool) -> None:
        """The step's block is over: what the session does, and the script."""
        for feed in self.feeds:
            feed.acknowledge() if counts else feed.rewind()
        if self.shape.asks:
            self.rollback.completion_read = True
        if counts or not self.shape.asks:
            self.place("between")
        self.number += counts

    def _take(self) -> None:
        """The batch of the step, of all ranks together, as it is at any world size."""
        if not self.feeds:
            self.batch = torch.randn(6, 3, generator=torch.Generator().manual_seed(self.number))
            return
        parts = [next(feed).data for feed in self.feeds]
        x, which = (torch.cat(column) for column in zip(*parts, strict=True))
        self.batch = x[which.argsort()]

    def reshard(self, size: int) -> None:
        """The world has so many ranks now; the first feed has the position."""
        for rank, feed in enumerate(self.feeds[:1]):
            feed.reshard(rank, size)
        made = [_feed(self.shape.loader, 0, rank, size) for rank in range(1, size)] if self.feeds else []
        for feed in made:
            feed.saved.load_state_dict(self.feeds[0].saved.state_dict())
        self.feeds[1:] = made

    def place(self, where: str) -> None:
        """What the script does there."""
        shape, n = self.shape, self.number
        if shape.schedule_at == where:
            if shape.schedule == "each" or (shape.schedule == "epoch" and n % 3 == 2):
                self.state["schedule"].step()
            elif shape.schedule == "hand":
                for group in self.optimizers[0].param_groups:
                    group["lr"] = 0.1 / (n + 1)
        if shape.ema and shape.ema_at == where and n % shape.ema_every == shape.ema_every - 1:
            self._average()
        if shape.counter_at == where and n % shape.counter_every == shape.counter_every - 1:
            counter = self.state["counter"]
            counter["n"] += 1
            counter["seen"][0] += n
            counter["seen"] = [*counter["seen"][:2], torch.full((2,), float(n))]

    def _average(self) -> None:
        ema = self.state["ema"]
        if isinstance(ema, Shadow):
            ema.update()
            return
        for average, p in zip(ema.parameters(), self.model.parameters(), strict=True):
            if self.shape.ema == "data":
                average.data.mul_(0.9).add_(p.data, alpha=0.1)
            else:
                with torch.no_grad():
                    average.mul_(0.9).add_(p, alpha=0.1)

    def step(self) -> None:
        try:
            self._work()
        except Exception:
            if not self.shape.catches:
                raise

    def _work(self) -> None:
        shape, n = self.shape, self.number
        self.place("start")
        if shape.zero_at == "start":
            self._zero()
        if shape.optimizer == "lbfgs":
            self.place("before")
            self.optimizers[0].step(self._closure)
        else:
            for turn in range({"gan": 2, "ppo": 4}.get(shape.optimizer, 1)):
                if turn:
                    self._zero()
                self._backward(turn)
                if shape.accumulates > 1 and n % shape.accumulates < shape.accumulates - 1:
                    return
                if shape.metric:
                    self.collective(torch.zeros(3))
                if not turn:
                    self.place("before")
                self._make(turn)
        self.place("after")
        if shape.zero_at == "after" and shape.accumulates == 1:
            self._zero()
        for _ in range(shape.tails if n % shape.tails_every == 0 else 0):
            self.collective(torch.zeros(2))
            self.place("tail")
        if not shape.tails:
            self.place("tail")
        if shape.zero_at == "tail" or shape.accumulates > 1:
            self._zero()

    def _zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.shape.to_none)

    def _backward(self, turn: int) -> None:
        scaler = self.state.get("scaler")
        for x in self.batch.add(turn).chunk(self.shape.micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.shape.autocast):
                loss = self.model(x, self.number).square().mean()
            if self.shape.overflows and self.number % self.shape.overflows == self.shape.overflows - 1:
                loss = loss * float("inf")
            (scaler.scale(loss) if scaler is not None else loss).backward()
        for p in self.model.parameters():
            if p.grad is not None:
                self.collective(p.grad)
        if self.shape.clip:
            if scaler is not None:
                scaler.unscale_(self.optimizers[turn % len(self.optimizers)])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def _make(self, turn: int) -> None:
        if self.shape.optimizer == "sam":
            sam = self.optimizers[1]
            sam.first_step()
            self._backward(turn)
            sam.second_step()
            return
        optimizer = self.optimizers[turn % len(self.optimizers)]
        scaler = self.state.get("scaler")
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def _closure(self) -> torch.Tensor:
        self._zero()
        self._backward(0)
        return torch.zeros(())

    def contents(self) -> Any:
        """All that is tracked, to be compared."""
        found = capture(self.state, 0)
        return found.values, {name: content(t) for name, t in found.tensors.items()}


def _feed(kind: str, seed: int, rank: int, size: int) -> Feed:
    """The loader as scripts make it, cut for this rank. What a new process has seeded is no matter."""
    generator = torch.Generator().manual_seed(seed)
    sampler: Any = None
    match kind:
        case "elastic":
            made = ElasticLoader(DATA, global_batch=RANKS * SHARE, seed=0, rank=rank, world_size=size)
            feed = feed_of(made, RANKS, World(rank, size), frozenset({1, RANKS}))
            assert feed is not None
            return feed
        case "distributed":
            sampler = DistributedSampler(DATA, num_replicas=1, rank=0, seed=seed)
        case "weighted":
            sampler = WeightedRandomSampler(torch.arange(1.0, 23).tolist(), 22, generator=generator)
    loader: Any = DataLoader(DATA, SHARE, shuffle=sampler is None, sampler=sampler, generator=generator)
    feed = feed_of(loader, RANKS, World(rank, size), frozenset({1, RANKS}))
    assert feed is not None
    return feed


def settle(members: Sequence[Member], qualities: Sequence[Validity], size: int) -> None:
    """What a round of `size` ranks does. Raises `NoState`."""
    told = [
        MemberState(m.number, q, *(state_digests(m.state) if q > Validity.NONE else (0, 0)))
        for m, q in zip(members, qualities, strict=True)
    ]
    try:
        found = agree(told)
    except NoState:
        assert all(q <= Validity.NONE for q in qualities), f"whole states differ: {told}"
        raise
    assert found.holder is not None
    assert not found.diverged, told
    captured = capture(members[found.holder].state, 0)
    held = {name: t.clone() for name, t in captured.tensors.items()}
    for rank in found.receivers:
        tensors = {name: t.clone() for name, t in held.items()}  # an optimizer keeps what it is given
        apply(members[rank].state, {"state": captured.values}, tensors, rank)
        members[rank].number = found.step
    for member in members:
        member.reshard(size)
    there = [any(column) for column in zip(*(m.rollback.gradients.present for m in members), strict=True)]
    for member in members:
        member.lost = False
        member.rollback.moved()
        member.rollback.gradients.add(there)


def undisturbed(shape: Shape) -> Member:
    found = Member(shape, 0)
    assert found.run(STEPS) is None
    return found


def disturbed(shape: Shape, losses: Sequence[tuple[int, int, int]]) -> list[Member]:
    """Two members lose a third at `losses`: (step, collective of the one, of the other), `BETWEEN` for behind the step;
    then a new one comes. Raises `NoState`."""
    members = [Member(shape, 0), Member(shape, 0)]
    for i, (step, *collectives) in enumerate(losses):
        for member, collective in zip(members, collectives, strict=False):
            member.lose = (step, collective)
        qualities = [m.run(STEPS) for m in members]
        if all(q is None for q in qualities):
            break  # there were not so many
        if any(q is None for q in qualities):
            # It has not come to so many, and is lost at the next one.
            ahead = [m for m, q in zip(members, qualities, strict=True) if q is None]
            assert all(m.number == STEPS for m in ahead)
            qualities = [Validity.WHOLE if q is None else q for q in qualities]
        new = Member(shape, 50 + i)
        settle([*members, new], [*(q for q in qualities if q is not None), Validity.NONE], RANKS - i % 2)
        members = [*members[-1:], new]
    for member in members:
        member.lose = None
        assert member.run(STEPS) is None
    return members
