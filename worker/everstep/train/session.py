"""The session: a training loop that is restored, saved, reported and stopped in order.

    with everstep.start("s3://bucket/run", every_steps=100) as run:
        model, optimizer = …
        run.track(model=model, optimizer=optimizer)
        loader = run.loader(dataset, global_batch=512)
        for step in run.steps(loader, until=10_000):
            with step as batch:
                loss = criterion(model(batch.data[0]), batch.data[1])
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)

Invariants: what is saved is the state between two steps, the data's position in it; every rank saves, stops and ends at
the same step; a step that raised is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint import Checkpointer, RngState
from everstep.data import ElasticLoader
from everstep.data.assignment import World as Cut
from everstep.train import ending, once
from everstep.train.between import Between
from everstep.train.boundary import Boundary
from everstep.train.byhand import ByHand
from everstep.train.census import Census
from everstep.train.cuts import Cuts
from everstep.train.evaluation import Evaluations, figures
from everstep.train.feeding import Feed, feed_of
from everstep.train.meshes import make_mesh
from everstep.train.randomness import STATE, Randomness, Rng, source_of
from everstep.train.recovery.recovery import Recovery
from everstep.train.recovery.reducers import BUCKETS, Reducers
from everstep.train.recovery.rounds import AgentRounds
from everstep.train.recovery.scope import UNKNOWN
from everstep.train.report import Reporter
from everstep.train.step import LoopError, Phase, Step
from everstep.train.switches import SWITCHES, Switches
from everstep.train.world import Place, most_processes, take_place
from everstep.train.worlds import Recovering, Steady, World

RESERVED = ("step", "data", "rng", BUCKETS, STATE, SWITCHES, once.KEY)


def start(
    checkpoint: str | Checkpointer | None = None,
    *,
    every_steps: int | None = None,
    every_seconds: float | None = None,
    rng: Rng = True,
    reporter: Reporter | None = None,
    **options: Any,
) -> Run:
    """Join the world that the environment describes (alone without one) and begin a run.

    `checkpoint`: a URL or folder (default: `EVERSTEP_CHECKPOINT_URL`; without either nothing is saved), or a
    `Checkpointer`; `options` go to the one that is made.

    `rng`: what sets the random generators. True: the session, at each step, from the run's seed, the step and the rank;
    ranks that the script has seeded alike draw alike. "rank": the same, and each rank draws other numbers. "saved": the
    script alone; commits save and restore them. False: the script alone.
    """
    rounds = AgentRounds.find()
    recovery = Recovery(rounds) if rounds is not None else None
    if recovery is not None:
        recovery.start(most_processes())
    place = take_place()
    boundary = Boundary.find(checkpoint, every_steps, every_seconds, options, reporter)
    return Run(place, boundary, recovery, rng=rng)


class Run:
    """One run of a training script in this process; see the module. Made by `start`."""

    def __init__(self, place: Place, boundary: Boundary, recovery: Recovery | None, *, rng: Rng) -> None:
        self.place = place
        self._boundary = boundary
        self._recovery = recovery
        self._random = Randomness(rng, place.device)
        self._state: dict[str, Any] = {STATE: self._random, **({"rng": RngState()} if rng == "saved" else {})}
        self._switches = self._state[SWITCHES] = Switches(self._state)
        self._untracked = set[str]()
        self._census = Census(self._state, self._untracked)
        self._mesh: tuple[int, Any] | None = None
        self._loop = False
        self._cuts = Cuts(place.most if recovery is not None else None)
        self._by_hand = ByHand(worlds_change=recovery is not None)
        self._goal = 0  # steps
        self._world: World | None = None  # while it is not complete
        self._taken: Step | None = None  # the newest
        self._ended_by: BaseException | None = None  # what the loop raised
        self._onces, self._evaluations = once.Onces(), Evaluations()
        boundary.join()

    @property
    def rank(self) -> int:
        """This process's rank in the present world, which another may follow. Raises `LoopError` before `steps` where
        nobody knows it yet."""
        if self._recovery is not None and not self._loop and self.place.most > 1:
            raise LoopError(f"run.rank: {UNKNOWN}")
        return self._rank

    @property
    def world_size(self) -> int:
        """Processes in the present world. Before `steps` begins, where worlds may change: the most that the job may
        have, so that what depends on there being others is built also by a process that begins alone."""
        if self._recovery is None:
            return self.place.world_size
        return dist.get_world_size() if self._loop else self.place.most

    @property
    def _rank(self) -> int:
        return dist.get_rank() if self._recovery is not None else self.place.rank

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._boundary.step

    def track(self, **objects: Any) -> None:
        """Name what makes up the training state: modules, optimizers, schedulers, scalers, tensors, anything with
        `state_dict` and `load_state_dict`, and random generators. Before the first step."""
        if self._loop:
            raise LoopError("track() after the first step: what was restored by then is not in the new object")
        for name, value in objects.items():
            if name in RESERVED or name in self._state or name in self._random:
                what = "reserved" if name in RESERVED else "tracked already"
                raise LoopError(f"track({name}=…): the name {name!r} is {what}; use another")
            held = value if source_of(value) is None else self._random.track(name, value)
            if held is not None:
                self._state[name] = held

    @property
    def shared_rng(self) -> torch.Generator:
        """A generator whose numbers in each step are the same on all ranks, a function of the run's seed and the step:
        for what must not differ between ranks, such as a layer that is dropped. Of the CPU, in the steps."""
        return self._random.shared

    def untracked(self, *names: str) -> None:
        """What training changes and may be lost with its process: not refused, not warned of. By the name that the
        refusal gives, that of a variable (`"probe"`, with all that it holds) or that of a class. At any time."""
        self._untracked.update(names)

    def mesh(self, *, shard: int) -> Any:
        """The `DeviceMesh` of replicas × shards for FSDP2: `fully_shard(model, mesh=run.mesh(shard=8))`. One a run;
        before the model is built. See docs/reference/session.md."""
        if self._mesh is None:
            if self._loop:
                raise LoopError("mesh() after the first step: make the mesh before the model that is sharded over it")
            self._mesh = shard, make_mesh(self.place, self._recovery, shard)
        if self._mesh[0] != shard:
            raise LoopError(
                f"mesh(shard={shard}): this run has a mesh of {self._mesh[0]} shards; use one for all modules"
            )
        return self._mesh[1]

    def loader(self, dataset: Any, *, global_batch: int, seed: int = 0, **options: Any) -> ElasticLoader:
        """An `ElasticLoader` cut for this rank; pass it to `steps`."""
        cut = self._cut()
        options |= {"rank": cut.rank, "world_size": cut.size}
        made = ElasticLoader(dataset, global_batch=global_batch, seed=seed, **options)
        self._cuts.add(made)
        return made

    def once(self, fn: Callable[[], Any], *, each: str = "job") -> once.Once:
        """Have one process of the job call `fn` when the loop begins; `each="machine"`: one of each machine, at once,
        before this returns. What it returns (anything that JSON holds) is the `value` of what this returns, on all
        ranks. If the process dies in it, another calls it again. Before `steps`."""
        if self._loop:
            raise LoopError("once() after steps() began: call it before the loop")
        return self._onces.add(fn, each)

    def evaluate(self, fn: Callable[[], Any], *, every: int) -> None:
        """Call `fn` on all ranks after each `every`-th step and after the last, with collectives if it likes. If a peer
        is lost in it, all call it again in the new world. Modes, buffers and random generators are put back after it;
        a mapping that it returns is logged. Before `steps`."""
        if self._loop:
            raise LoopError("evaluate() after steps() began: a process that comes later would not call it. Call it "
                            "before the loop: `run.evaluate(fn, every=500)`")  # fmt: skip
        self._evaluations.add(fn, every)

    def train(
        self,
        fn: Callable[[Any], Any],
        loader: ElasticLoader | None = None,
        *,
        until: int | None = None,
        epochs: int | None = None,
    ) -> None:
        """`steps`, with `fn` as what a step does: it is called with the step's batch (with `micro_batch=` an iterator
        over batches, without a loader None), and again if a peer was lost in it. A mapping that it returns is logged.
        """
        for step in self.steps(loader, until=until, epochs=epochs):
            with step as batch:
                self.log(**figures(fn(batch)))

    def log(self, **metrics: Any) -> None:
        """Numbers or 0-d tensors of this step, for the progress report. Never waits for a device."""
        self._boundary.log(metrics)

    def steps(self, loader: Any = None, *, until: int | None = None, epochs: int | None = None) -> Iterator[Step]:
        """Restore, then yield the steps that are left until `until` steps, or `epochs` epochs of `loader`, are done.

        `loader`: what `run.loader` made; or a `torch.utils.data.DataLoader`, which is taken over; or several of them in
        a tuple or a mapping. See docs/reference/data.md.

        Saves as the checkpointer's policy says and after the last step. On SIGTERM every rank finishes the same step,
        the state is committed, and `Preempted` is raised (exit code 86).
        """
        _check_goal(loader, until, epochs)
        if self._loop:
            raise LoopError("steps() was called before in this run; one loop over all steps is what can be resumed")
        feed, world, count = self._join_world(loader)
        self._goal = until if until is not None else (epochs or 0) * len(feed or ())  # as cut in the run that goes on
        whole = feed is None or feed.whole
        self._boundary.watch()
        self._by_hand.begin(feed, self._state)
        try:
            while True:
                while self.step < self._goal:
                    if not world.ready():
                        continue
                    world.step_begins()
                    self._random.begin(self.step, self._rank)
                    step = Step(self.step, feed, whole, count, world)
                    self._taken = step
                    yield step
                    self._boundary.check_handler(step.number)
                    if step.phase in (Phase.LOST, Phase.COUNTED):
                        world.go_on(step.phase)
                    elif step.phase is not Phase.DONE:
                        raise LoopError(
                            f"step {step.number} was taken and not completed: write `with step as batch:` around its "
                            "work"
                        )
                    else:
                        self._by_hand.step_over(step.number)
                        if self.step < self._goal:
                            world.between()
                if world.ready() and world.finish():
                    self._world = None
                    self._random.begin(self.step, self._rank)  # what follows draws alike, however the run came here
                    return
        except (Exception, SystemExit) as e:  # the latter to stop, with a code that a launcher knows
            self._ended_by = e
            raise
        finally:
            self._by_hand.end()
            self._cuts.end()
            self._census.close()
            self._boundary.leave()

    def _join_world(self, loader: Any) -> tuple[Feed | None, World, Callable[[], None]]:
        """The data, the world that has the state now, and what completes a step."""
        # What a script may have told a sampler in good faith.
        sizes = frozenset({1, self.place.most} if self._recovery is not None else {self.place.world_size})
        feed = feed_of(loader, self.place.most, self._cut(), sizes)
        self._loop = True
        if feed is not None:
            self._state["data"] = feed.saved
        if len(self._onces):
            self._state[once.KEY] = self._onces.results
        self._state[BUCKETS] = reducers = Reducers(self._state)

        def count() -> None:
            """A step is complete."""
            if feed is not None:
                feed.acknowledge()
            self._boundary.count(self.step + 1, total=self._goal, epoch=feed.epoch if feed is not None else None)

        self._random.start()
        self._switches.start()
        between = Between(self._onces, self._evaluations, lambda: self._goal)
        world: World = Steady(self._boundary, self._state, reducers, feed, self.place.world_size, between, self._census)
        if self._recovery is not None:
            self._recovery.program.evaluations = len(self._evaluations)
            world = Recovering(
                self._recovery,
                self._boundary,
                self._state,
                reducers,
                feed,
                self._cuts,
                between,
                self._census,
            )
        world.begin()
        self._world = world
        return feed, world, count

    def close(self) -> None:
        """Finish the save in flight and leave the process group, if this run made it."""
        self._boundary.close()
        if self.place.made and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not ending.is_done(error):
            return
        if self._world is not None:
            self._end_early(self._world)
        self.close()

    def _end_early(self, world: World) -> None:
        """The script has left its loop. Raises `LoopError` unless all ranks have, after the same step."""
        refused = self._recovery.program.scope.refused if self._recovery is not None else None
        ending.check_error(self._ended_by or refused, self.step, self._goal)
        ending.check_step(self._taken)
        if self._taken is not None and self._taken.phase in (Phase.LOST, Phase.COUNTED):
            world.go_on(self._taken.phase)
        if self.step < self._goal:
            world.all_leave()
        if not world.finish():
            raise LoopError("a peer was lost while the run was saved, which was left before its last step")
        self._world = None

    def _cut(self) -> Cut:
        """What this process has to read of the data, in the present world."""
        return Cut(self._rank, dist.get_world_size() if self._recovery is not None else self.place.world_size)


def _check_goal(loader: Any, until: int | None, epochs: int | None) -> None:
    if (until is None) == (epochs is None):
        raise LoopError("steps(): say either until=STEPS or epochs=N")
    if until is None and loader is None:
        raise LoopError("steps(epochs=…) needs a loader, whose length is an epoch; without one say until=STEPS")
