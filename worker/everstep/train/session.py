"""The session: a training loop that is restored, saved, reported and stopped in order. docs/reference/session.md has
whole scripts.

Invariants: a save holds the state between two steps, including the data's position; every rank saves, stops and ends at
the same step; a step that raised is not counted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint import Checkpointer, Union
from everstep.checkpoint.save import at_exit
from everstep.contract import env
from everstep.data import ElasticLoader
from everstep.recovery.announcements import Announcements
from everstep.recovery.ddp import checks, uneven_inputs
from everstep.recovery.engine import Recovery
from everstep.recovery.errors import LoopError
from everstep.recovery.group.script_location import UNKNOWN
from everstep.recovery.state.randomness import Rng, source_of
from everstep.recovery.state.shape import MODEL, SHARD, shape_of
from everstep.torch_private import names
from everstep.train import early_exit, evaluation, once, refused_end
from everstep.train.coordination.group_shutdown import leave_group
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.guards import call_mistakes, calls_before_steps
from everstep.train.loops import Loops
from everstep.train.mesh import average
from everstep.train.pipelines import PipelineSchedule
from everstep.train.process_place import most_processes, take_place
from everstep.train.worlds import RESERVED

_started: list[Run] = []  # the last


def start(
    checkpoint: str | os.PathLike[str] | Checkpointer | None = None,
    *,
    every_steps: int | None = None,
    every_seconds: float | None = None,
    rng: Rng = True,
    compare_gradients: bool = True,
    strict: bool = False,
    **options: Any,
) -> Run:
    """Join the world that the environment describes (alone without one) and begin a run.

    `checkpoint`: a URL or folder (default: `EVERSTEP_CHECKPOINT_URL`; without either nothing is saved), or a
    `Checkpointer`. For a URL or folder, `options` go to the `Checkpointer` that is made.

    `rng`: who sets the random generators. True: the session sets them at each step, from the run's seed, the step and
    the rank; ranks that the script has seeded alike draw the same numbers. "rank": the same, but each rank draws
    different numbers. "saved": the script sets them, and commits save and restore them. False: only the script.

    `compare_gradients`: under everstep-run, a process that replaces a lost one first computes its step as a rank that
    has already trained (a shadow step). After a restart of all processes, rank 0's first step is compared with the same
    step before. The run is refused if gradients differ. See docs/reference/session-losses.md.

    `strict`: names that the loop carries from step to step, and that are not tracked, are refused before the first step
    in place of a warning. `EVERSTEP_STRICT=1` does the same. Raises `LoopError` if that variable is neither 0 nor 1.
    """
    strict = strict or strict_by_environment()
    names.check_once()
    rounds = Announcements.find()
    recovery = Recovery(rounds) if rounds is not None else None
    if recovery is not None:
        if _started:
            raise LoopError(
                "everstep.start() came a second time in this process. Under everstep-run a process has one run: its "
                "process group is the job's. Begin the next training in a job of its own, with another checkpoint URL"
            )
        recovery.start(most_processes())
    process = take_place()
    uneven_inputs.install()
    checks.check_no_sync()
    coordinator = StepCoordinator.find(checkpoint, every_steps, every_seconds, options)
    if recovery is not None:
        recovery.on_profile(coordinator.live_profile.ask)  # also before the first step
    run = Run(process, coordinator, recovery, rng=rng, compare_gradients=compare_gradients, strict=strict)
    _started[:] = [run]
    at_exit.end_run(run._close_at_end)
    saves = f"{'a' if coordinator.saves else 'no'} checkpoint URL, every_steps={every_steps}"
    run._ask(f"everstep.start({saves}, rng={rng!r}, compare_gradients={compare_gradients})", sys._getframe(1))
    return run


def strict_by_environment() -> bool:
    """Whether `EVERSTEP_STRICT` makes a run strict. Raises `LoopError` if it is neither 0 nor 1."""
    setting = os.environ.get(env.STRICT, "")
    if setting not in ("", "0", "1"):
        raise LoopError(
            f"{env.STRICT}={setting}: 1 refuses what the loop carries untracked, 0 warns of it; write 0 or 1"
        )
    return setting == "1"


def current() -> Run:
    """The run that this process has started last, for code that has no reference to it."""
    if not _started:
        raise LoopError("everstep.current(): no run was started; write `run = everstep.start(…)` first")
    return _started[0]


class Run(Loops):
    """One run of a training script in this process; see the module. Made by `start`."""

    @property
    def rank(self) -> int:
        """This process's rank in the present world; it may change with the world. Raises `LoopError` before `steps` if
        it is not known yet."""
        if self._recovery is not None and not self._loop and self.process.most > 1:
            raise LoopError(f"run.rank: {UNKNOWN}")
        if self._shadow_step is not None:
            self._shadow_step.asks_rank()
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of processes in the present world. Before `steps` begins in a world that may change, it is the
        largest number that the job may have: so a process that begins alone also builds objects for several ranks."""
        if self._recovery is None:
            return self.process.world_size
        return dist.get_world_size() if self._loop else self.process.most

    @property
    def device(self) -> torch.device:
        return self.process.device

    def track(self, *unnamed: Any, **objects: Any) -> None:
        """Declare the training state: modules, optimizers, schedulers, scalers, tensors, random generators, and any
        object with `state_dict` and `load_state_dict`. Call it before the first step."""
        if unnamed:
            raise LoopError(call_mistakes.unnamed(unnamed, objects, sys._getframe(1)))
        if self._loop:
            raise LoopError(call_mistakes.tracked_late(objects))
        for name, value in objects.items():
            if name in RESERVED or name in self._state or name in self._random:
                what = "reserved" if name in RESERVED else "tracked already"
                raise LoopError(f"track({name}=…): the name {name!r} is {what}; use another")
            if isinstance(value, Union):
                raise LoopError(call_mistakes.marked(name))
            tracked = value if source_of(value) is None else self._random.track(name, value)
            if tracked is not None:
                self._state[name] = tracked

    @property
    def shared_rng(self) -> torch.Generator:
        """A CPU generator whose numbers in each step are the same on all ranks: a function of the run's seed and the
        step. Use it for decisions that must not differ between ranks, such as dropping a layer. Only in steps."""
        return self._random.shared

    def untracked(self, *names: str) -> None:
        """Declare objects that training changes and that may be lost with their process, so that they cause no refusal
        and no warning. A name is that in the refusal or warning, that of a variable (`"probe"`, with all that it holds)
        or that of a class. Call it at any time."""
        self._untracked.update(names)

    def mesh(self, *, shard: int | None = None, tensor: int | None = None, model: int | None = None) -> Any:
        """The `DeviceMesh` of replicas × shards: `fully_shard(model, mesh=run.mesh(shard=8))` for FSDP2, or
        `parallelize_module(model, run.mesh(tensor=8)["tensor"], plan)` for tensor parallelism. `model=8`: the script
        itself divides its model over 8 neighbours in rank, by stages or by parts of layers, with process groups of its
        own. Call it once a run, before the model is built. See docs/reference/session-sharding.md."""
        shape = shape_of(shard, tensor, model)
        if self._mesh is None:
            if self._loop:
                raise LoopError("mesh() after the first step: make the mesh before the model that is sharded over it")
            self._make_mesh(shape)
            self._ask(f"run.{shape}", sys._getframe(1))
        if self._requested_shape != shape:
            raise LoopError(f"{shape}: this run has {self._requested_shape}; use one mesh for all modules")
        return self._mesh

    def pipeline(self, make: Callable[[], Any]) -> PipelineSchedule:
        """A pipeline of `torch.distributed.pipelining` over the ranks of a replica of `run.mesh(model=N)`. `make` makes
        the stages and returns the schedule; the returned object has the schedule's `step` and `eval`. All ranks call
        `make` in the first step of each round, because torch's stages cannot accept a new peer. Stages need their
        shapes (`input_args=`, `output_args=`). `run.average_gradients` averages the gradients."""
        if self._recovery is not None and (self._mesh is None or self._shape.kind != MODEL):
            raise LoopError("run.pipeline(make): write `run.mesh(model=N)` before it, where N stages are one replica")
        return PipelineSchedule(make, self._round_number)

    def _round_number(self) -> int | None:
        round_ = self._recovery.round.announced if self._recovery is not None else None
        return round_.number if round_ is not None else None

    def average_gradients(self, *modules: torch.nn.Module) -> None:
        """Average the gradients of these parameters over the replicas of `run.mesh(tensor=N)` or `model=N`, in place,
        as DistributedDataParallel does for a model that is not sharded. Call it after the last `backward()` of a step
        and before gradients are read. Collective."""
        if self._mesh is None or self._shape.kind == SHARD:
            raise LoopError("average_gradients(): for a model that is cut over run.mesh(tensor=N)['tensor'] or over "
                            "run.mesh(model=N). Take the line out: DistributedDataParallel, or fully_shard, averages "
                            "the gradients of other models")  # fmt: skip
        average(modules, self._mesh)

    def loader(self, dataset: Any, *, global_batch: int, seed: int = 0, **options: Any) -> ElasticLoader:
        """An `ElasticLoader` cut for this rank; pass it to `steps`."""
        cut = self._cut()
        options |= {"rank": cut.rank, "world_size": cut.size}
        made = ElasticLoader(dataset, global_batch=global_batch, seed=seed, **options)
        self._resharding.add(made)
        return made

    def once(self, fn: Callable[[], Any], *, each: str = "job") -> once.Once:
        """Let one process of the job call `fn` when the loop begins. With `each="machine"`, one process of each machine
        calls it at once, before this method returns. The returned object's `value` is the result of `fn` on all ranks;
        it must consist of JSON values. If the process dies in `fn`, another calls it again. Call it before `steps`."""
        if self._loop:
            raise LoopError("run.once(fn) after the loop began: a process that comes later would not call it. Write it "
                            "before `for step in run.steps(…):`")  # fmt: skip
        if each == "job":
            self._ask(f"run.once({calls_before_steps.name_of(fn)})", sys._getframe(1))
        return self._onces.add(fn, each)

    def evaluate(self, fn: Callable[..., Any], loader: Any = None, *, every: int | None = None) -> None:
        """Call `fn` on all ranks; it may use collectives. If a peer is lost in it, all call it again in the new world.
        Modes, buffers and random generators are restored afterwards. A mapping that `fn` returns is logged.

        `every`: call `fn` after each `every`-th step and after the last one; call this method before `steps`. Without
        `every`, `fn` is called now, in the loop of `epochs` and outside of an epoch's steps. `loader`: a DataLoader;
        `fn` is called with each batch of this rank's share of it, and returns nothing.
        """
        call = fn if loader is None else evaluation.over(fn, loader, self._most_readers, self._cut)
        if every is None:
            self._evaluate_now(call, calls_before_steps.name_of(fn))
        elif self._loop:
            raise LoopError("evaluate(every=…) after steps() began: a process that comes later would not call it. Call "
                            "it before the loop: `run.evaluate(fn, every=500)`")  # fmt: skip
        else:
            self._evaluations.add(call, every)
            self._ask(f"run.evaluate({calls_before_steps.name_of(fn)}, every={every})", sys._getframe(1))
            self._script.called.append(fn)

    def check_sync(self, *, every: int) -> None:
        """After each `every`-th step and after the last compare all bytes of the tracked modules' parameters and
        gradients on the ranks that should hold the same. Raises `LoopError` on all ranks, naming the first tensor that
        differs and its rank. Collective, in the scope of an evaluation; before `steps`. Reads the whole model: for a
        run that is suspected of drifting apart. What is looked at without it: docs/reference/session-steps.md."""
        if self._loop:
            raise LoopError("run.check_sync(every=…) after the loop began: a process that comes later would not take "
                            "part. Write it before `for step in run.steps(…):`")  # fmt: skip
        self._evaluations.add(evaluation.SyncCheck(self._state, lambda: self._shape), every)
        self._ask(f"run.check_sync(every={every})", sys._getframe(1))

    def train(
        self,
        fn: Callable[[Any], Any],
        loader: ElasticLoader | None = None,
        *,
        until: int | None = None,
        epochs: int | None = None,
    ) -> None:
        """Take all steps, and call `fn` in each with the step's batch; call it again if a peer was lost in it. With
        `micro_batch=`, `fn` gets an iterator over batches, and without a loader None. A mapping that it returns is
        logged. In the loop of `epochs`, `run.train(fn)` takes the rest of the epoch, and has no further arguments.
        """
        self._script.function = fn
        for step in self.steps(loader, until=until, epochs=epochs):
            with step as batch:
                self.log(**evaluation.figures(fn(batch)))

    def scale(self, loss: Any) -> Any:
        """`batch.scale(loss)` of the present batch, for code that has no reference to the batch. Call it in a step."""
        if self._taken is None:
            raise LoopError(
                "run.scale(loss) outside of a step: there is no batch whose weight the loss could have. Call it inside "
                "`with step:`"
            )
        return self._taken.scale(loss)

    def log(self, **metrics: Any) -> None:
        """Log numbers or 0-d tensors of this step, in it or after it in the loop. They go to the progress report. Those
        of rank 0 also go to the step's commit, where `Keep(best=…, metric="loss")` finds them. Never waits for a
        device."""
        self._coordinator.log(metrics, of_state=self._nesting.nested and not self._nesting.in_steps)

    def close(self) -> None:
        """Finish the save in flight, and leave the process group if this run made it. The end of the `with` block does
        the same, and so does the end of a script that has left its loop."""
        self.__exit__(*sys.exc_info())

    def _close(self) -> None:
        self._coordinator.close()
        if self.process.made and dist.is_initialized():
            leave_group()

    def _close_at_end(self) -> None:
        """The script ends in order. If it has left its loop, by `break`, `return` or `sys.exit()`, its run is
        complete."""
        if self._world is not None:
            self.__exit__(None, None, None)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_forked:
            return
        with refused_end.remembered():
            if not early_exit.is_done(error):
                self._ended_by = self._ended_by or error
                refused_end.stands(error)
                return
            if self._world is not None:
                self._end_early(self._world)
            self._close()
