"""The loops of a run: over all its steps, or over epochs with the steps of each in it.

Invariants: every rank saves, stops and ends at the same step; a step that raised is not counted; a run has one loop.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch.distributed as dist

from everstep.checkpoint import RngState
from everstep.contract import exit_codes, forks, refusal
from everstep.contract.stamp import Stamp
from everstep.data.plan.assignment import World as DataWorld
from everstep.recovery.ddp.reducers import BUCKETS, Reducers
from everstep.recovery.engine import Recovery
from everstep.recovery.errors import LoopError
from everstep.recovery.state.randomness import STATE, Randomness, Rng
from everstep.recovery.state.shape import Shape
from everstep.recovery.state.switches import SWITCHES, Switches
from everstep.reporting.stop_signal import Left, Preempted
from everstep.train import early_exit, once, refused_end
from everstep.train.between_steps import BetweenSteps
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.evaluation import Evaluations
from everstep.train.feeding.feed import Feed, feed_of
from everstep.train.feeding.resharding import Resharding
from everstep.train.feeding.unmanaged_loaders import UnmanagedLoaders
from everstep.train.further_loops import FurtherLoops, TakenOnce
from everstep.train.guards import call_mistakes, calls_before_steps, loaded_before
from everstep.train.guards.common_samples import SAMPLES, CommonSamples
from everstep.train.guards.comparison import rehearsed
from everstep.train.guards.comparison.restart_check import RestartCheck
from everstep.train.guards.comparison.shadow_step import ShadowStep
from everstep.train.guards.leavable_block import may_be_left
from everstep.train.guards.left_state import LeftState
from everstep.train.guards.script_check import ScriptCheck
from everstep.train.guards.step_after_stop import StepAfterStop
from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck
from everstep.train.mesh import make_mesh
from everstep.train.nested_loops import NestedLoops
from everstep.train.process_place import ProcessPlace
from everstep.train.recovering_world import RecoveringWorld
from everstep.train.step import Phase, Step, StepScope, failed
from everstep.train.worlds import RESERVED, FixedWorld, World

log = logging.getLogger("everstep.train")


class Loops:
    """The loops of `Run`; `session` adds the methods that a script calls before it begins."""

    def __init__(
        self,
        process: ProcessPlace,
        coordinator: StepCoordinator,
        recovery: Recovery | None,
        *,
        rng: Rng,
        compare_gradients: bool = True,
        strict: bool = False,
    ) -> None:
        self.process = process
        self._coordinator = coordinator
        self._recovery = recovery
        self._compare_gradients = compare_gradients
        self._shadow_step: ShadowStep | None = None
        self._check: RestartCheck | None = None
        self._stamp: Stamp | None = None  # of a rehearsal of this program
        self._random = Randomness(rng, process.device)
        self._state: dict[str, Any] = {STATE: self._random, **({"rng": RngState()} if rng == "saved" else {})}
        self._switches = self._state[SWITCHES] = Switches(self._state)
        self._untracked = set[str]()
        self._untracked_check = UntrackedStateCheck(self._state, self._untracked)
        self._script = ScriptCheck(
            self._state, self._untracked, self._untracked_check.is_untracked, changes=recovery is not None,
            goes_on=recovery is not None or coordinator.saves, strict=strict,
        )  # fmt: skip
        self._mesh: Any = None
        self._requested_shape = self._shape = Shape()  # of the mesh: as the script said, and as it is in this process
        self._loop, self._further_loops = False, FurtherLoops()  # whether there was one; those behind it
        self._resharding = Resharding(process.most if recovery is not None else None)
        self._unmanaged = UnmanagedLoaders(worlds_change=recovery is not None)
        self._goal = 0  # steps
        self._world: World | None = None  # while it is not complete
        self._taken: Step | None = None  # the newest step
        self._ended_by: BaseException | None = None  # the error that ended the loop
        self._left: LeftState | None = None  # it was left early
        self._onces, self._evaluations, self._nesting = once.Onces(), Evaluations(), NestedLoops()
        self._between_steps = BetweenSteps(self._onces, self._evaluations, lambda: self._goal, self._nesting)
        self._feed: Feed | None = None
        self._is_forked, self._is_abandoned = False, False
        forks.after_fork(self)
        coordinator.join()

    def forked(self) -> None:
        """In a child that the script forks: the run, with its connections to other ranks, is its parent's. A child that
        leaves the loop, as by `sys.exit()`, ends nothing of it."""
        self._is_forked = True
        self._abandon()

    def _abandon(self) -> None:
        """An iterator over steps that is dropped from now on puts nothing back. As Python ends, modules and tensors are
        half taken apart when it drops what the script's variables hold."""
        self._is_abandoned = True
        if self._feed is not None:
            self._feed.abandon()

    @property
    def _rank(self) -> int:
        return dist.get_rank() if self._recovery is not None else self.process.rank

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._coordinator.step

    def steps(self, loader: Any = None, *, until: int | None = None, epochs: int | None = None) -> Iterator[Step]:
        """Restore, then yield the steps that are left until `until` steps, or `epochs` epochs of `loader`, are done.

        `loader`: what `run.loader` made; or a `torch.utils.data.DataLoader`, which is taken over; or several of them in
        a tuple or a mapping. See docs/reference/data.md.

        Saves as the checkpointer's policy says and after the last step. On SIGTERM every rank finishes the same step,
        the state is committed, and `Preempted` is raised (exit code 86).
        """
        return TakenOnce(self._steps(loader, until, epochs), self._asked_again)

    def _steps(self, loader: Any, until: int | None, epochs: int | None) -> Iterator[Step]:
        if self._nesting.nested:
            yield from self._steps_of_epoch(loader, until, epochs)
            return
        call_mistakes.check_goal(loader, until, epochs)
        with self._looping(loader, until, epochs) as (world, _):
            while True:
                while self.step < self._goal:
                    if not world.ready():
                        continue
                    step = self._begin_step(world)
                    yield step
                    self._end_step(step)
                    yield from self._after(world, step, last=self.step >= self._goal)
                if self._finish(world):
                    return

    def _one_more(self, world: World, why: Preempted) -> Iterator[Step]:
        """The run was asked to stop: begin the step after its last commit, for `restart_check`. Raises `why`."""
        self._ended_by = why  # also if the script leaves its loop in that step
        check = self._check
        if (
            check is None
            or isinstance(why, Left)
            or not self._coordinator.has_time
            or not may_be_left(sys._getframe(1))
        ):
            raise why
        rank = world.step_begins()
        self._random.begin(self.step, rank if rank is not None else self._rank)
        yield self._new_step(one_more := StepAfterStop(self._state, world))
        if one_more.seen:
            check.note()
        raise why

    def epochs(self, loader: Any, epochs: int) -> Iterator[int]:
        """`steps` in two loops: the number of each epoch that is left, from 0. In the outer loop's body
        `run.train(fn)`, or `for step in run.steps():`, takes the steps of the epoch.

        Other code in that body runs once in each process that exists then. Collectives belong into `run.evaluate(fn)`.
        See docs/how-to-convert.md.
        """
        return TakenOnce(self._epochs(loader, epochs), self._asked_again)

    def _epochs(self, loader: Any, epochs: int) -> Iterator[int]:
        if loader is None or not isinstance(epochs, int) or epochs < 0:
            raise LoopError(
                f"epochs({loader!r}, {epochs!r}): the loader that is trained on, and the number of epochs; write "
                "`run.epochs(loader, 10)`"
            )
        with self._looping(loader, None, epochs, nested=True) as (world, nesting):
            while True:
                feed = self._feed
                assert feed is not None
                while feed.epoch < epochs or nesting.behind_steps:
                    if not world.ready():
                        continue
                    yield nesting.epoch()
                    nesting.leave(self.step)
                    if self._all_are_at(world, "the end of the loop's body") and feed.epoch < epochs:
                        world.between()
                if self._finish(world):
                    return

    def _steps_of_epoch(self, loader: Any, until: int | None, epochs: int | None) -> Iterator[Step]:
        world, nesting, feed = self._world, self._nesting, self._feed
        if world is None or feed is None or nesting.in_steps or until is not None or epochs is not None:
            raise LoopError("steps() in the loop of run.epochs(loader, …): write `for step in run.steps():`, or "
                            "`run.train(fn)`, which takes the rest of the epoch. Once an epoch")  # fmt: skip
        if loader is not None and not feed.is_of(loader):
            raise LoopError("steps(loader) in the loop of run.epochs(another): an epoch is one of the loader that was "
                            "passed to run.epochs()")  # fmt: skip
        if nesting.has_begun_steps:
            self._further_loops.refuse(self.step, self._error, in_epoch=True)
        self._script.epoch_begins(sys._getframe(1), self._datasets, first_rank=self._rank == 0)
        nesting.steps_begin()
        if not self._all_are_at(world, "the steps of the epoch"):
            self._stay()
        self._unmanaged.steps_begin()
        given = False
        try:
            while nesting.steps_left:
                if not world.ready():
                    self._stay()
                    continue
                step = self._begin_step(world)
                yield step
                self._end_step(step)
                given = step.phase is Phase.LOST
                if nesting.steps_left or given:
                    yield from self._after(world, step, last=False)
                    self._stay()
        finally:
            nesting.steps_end(given=given)

    def _stay(self) -> None:
        if self._nesting.moved:
            log.error("the state that came is of another epoch than the loop; this process ends, and a new one takes "
                      "its place")  # fmt: skip
            raise SystemExit(exit_codes.NOT_RECOVERED)

    @contextmanager
    def _looping(
        self, loader: Any, until: int | None, epochs: int | None, *, nested: bool = False
    ) -> Iterator[tuple[World, NestedLoops]]:
        """Join the world; leave it whatever happens."""
        if self._loop:
            self._further_loops.refuse(self.step, self._error)
        self._ask(calls_before_steps.loop(loader, until, epochs, nested=nested), sys._getframe(1))
        with refused_end.remembered():
            feed, world = self._join_world(loader, nested)
        self._further_loops.first_step = self.step
        self._goal = until if until is not None else (epochs or 0) * len(feed or ())  # as cut in the run that goes on
        if self._rank == 0 and 0 < self._goal <= self.step:
            log.warning("the run is complete already: its commit has %d steps, of %d", self.step, self._goal)
        self._coordinator.watch()
        self._unmanaged.begin(feed, self._state)
        atexit.register(self._abandon)
        try:
            with feed if feed is not None else nullcontext():
                yield world, self._nesting
        except GeneratorExit:
            if not self._is_abandoned:
                self._note_left()
            raise
        except (Exception, SystemExit) as e:  # SystemExit stops the process with an exit code that a launcher knows
            self._ended_by = e
            refused_end.stands(e)
            raise
        finally:
            if not self._is_abandoned:
                atexit.unregister(self._abandon)
                self._unmanaged.end()
                self._resharding.end()
                self._untracked_check.close()
                self._coordinator.leave()

    def _asked_again(self, parts: int | None) -> None:
        """An iterator of this run is asked again: see `TakenOnce`."""
        self._further_loops.asked_again(self.step, self._error, parts, is_over=self.step >= self._goal)

    @property
    def _error(self) -> BaseException | None:
        """The error that ended the loop, or the newest step."""
        return self._ended_by or (self._taken.error if self._taken is not None else None)

    def _begin_step(self, world: World) -> Step:
        rank = world.step_begins()
        if rank is None:  # `dist.get_rank` looks for who asks, which takes time in each step
            rank = self._recovery.members.rank if self._recovery is not None else self.process.rank
        self._random.begin(self.step, rank)
        self._taken = self._new_step(world)
        return self._taken

    def _new_step(self, scope: StepScope) -> Step:
        feed = self._feed
        return Step(self.step, feed, feed is None or feed.whole, self._count, scope)

    def _end_step(self, step: Step) -> None:
        """The script asks for the next step."""
        if self._is_forked:
            raise LoopError(
                f"step {self.step} in a process that the script has forked (os.fork): the run is its parent's. "
                "End that process behind its work: os._exit(0)"
            )
        self._coordinator.check_handler(step.number)
        if step.phase is Phase.DONE:
            self._unmanaged.step_over(step.number)
        elif step.error is not None:
            raise LoopError(
                f"{failed(step)}, which the script caught outside of `with step`: what the step has changed is not "
                "whole, and the step is not counted. Take that `try` away, and mend what raises. To leave a bad batch "
                "out, test for it inside the block, and decide on all ranks alike",
                certain=refusal.find(step.error) is not None,
            ) from step.error
        elif step.phase is not Phase.LOST:
            raise LoopError(
                f"step {step.number} was taken and not completed: write `with step as batch:` around its work"
            )

    def _after(self, world: World, step: Step, *, last: bool) -> Iterator[Step]:
        """Do the work due between two steps. If the run is asked to stop, this gives a step that will not be made."""
        try:
            if step.phase is Phase.LOST:
                world.go_on(step.phase)
            elif not last:
                world.between()
        except Preempted as why:
            yield from self._one_more(world, why)

    def _finish(self, world: World) -> bool:
        if not (world.ready() and world.finish()):
            return False
        self._world = None
        refused_end.completed()
        self._random.begin(self.step, self._rank)  # so later code draws the same numbers, however the run came here
        return True

    def _count(self) -> None:
        """A step is complete."""
        feed = self._feed
        if feed is not None:
            feed.acknowledge()
        self._coordinator.count(self.step + 1, total=self._goal, epoch=feed.epoch if feed is not None else None)

    def _join_world(self, loader: Any, nested: bool) -> tuple[Feed | None, World]:
        """Make the data feed, and the world."""
        # The numbers of replicas that a script may rightly have given a sampler.
        most = self._most_readers
        sizes = self._shape.of_sizes(self.process.sizes)
        sampler_sizes = frozenset({1, most, *sizes} if self._recovery is not None else {most})
        feed = feed_of(loader, most, self._cut(), sampler_sizes, sizes)
        self._loop, self._feed = True, feed
        if feed is not None:
            self._state["data"] = feed.saved
            self._state[SAMPLES] = CommonSamples(feed.sources())
            if nested:
                self._nesting.begin(feed, self._state)
        if len(self._onces):
            self._state[once.KEY] = self._onces.results
        self._state[BUCKETS] = reducers = Reducers(self._state)
        self._random.start()
        self._switches.start()
        self._stamp = rehearsed.look_up(self._coordinator.schedule)
        if self._stamp is not None:
            self._coordinator.rehearsed(str(self._stamp))
        if self._comparable and self._coordinator.saves:
            self._check = RestartCheck(
                self._state, self._coordinator, self._script.may_differ, self._script.carried,
                hears=self._recovery is not None,
            )  # fmt: skip
        world: World = FixedWorld(
            self._coordinator, self._state, reducers, feed, self.process.world_size, self._between_steps,
            self._untracked_check, self._shape, self._asks(), self._check,
        )  # fmt: skip
        if self._recovery is not None:
            self._recovery.program.asks = self._asks()
            world = RecoveringWorld(
                self._recovery, self._coordinator, self._state, reducers, feed, self._resharding,
                self._between_steps, self._untracked_check, self._make_shadow_step(self._recovery, reducers),
                self._check,
            )  # fmt: skip
        refused = self._script.before_steps(sys._getframe(1), self._datasets, nested=nested)
        moved = loaded_before.moved_before(self._state)
        try:
            world.begin()
        except LoopError as e:
            raise (e if refused is None or str(refused) in str(e) else LoopError(f"{refused}. {e}")) from e.__cause__
        if refused is not None:
            raise refused
        if moved and self._rank == 0 and not self.step:
            log.warning(loaded_before.TEXT, ", ".join(moved))
        if self._rank == 0 and not nested:
            self._script.warn()
        if self._rank == 0 and not self.step and feed is not None:
            feed.say_global_batch()
        if self.step and self._compare_gradients and not self._comparable:
            why = "its state is cut over a mesh" if self._mesh is not None else "the session does not set its seeds"
            log.warning("this process is not compared with one that has trained: %s", why)
        self._world = world
        return feed, world

    @property
    def _datasets(self) -> Collection[int]:
        """The ids of those that are trained on."""
        return self._feed.datasets if self._feed is not None else ()

    @property
    def _comparable(self) -> bool:
        """Whether a step's result is determined by known inputs: its random numbers, and the whole state."""
        return self._compare_gradients and self._random.each_step and self._mesh is None

    def _make_shadow_step(self, recovery: Recovery, reducers: Reducers) -> ShadowStep | None:
        """A shadow step is possible if the inputs of the other rank's step are known: its random numbers, and its share
        of the state."""
        if self._comparable:
            self._shadow_step = ShadowStep(
                self._state, recovery.members, recovery.program.stand_in, lambda: reducers.broadcast(self._state),
                self._script.may_differ, self._stamp.steps if self._stamp is not None else 0,
                self._script.carried,
            )  # fmt: skip
        return self._shadow_step

    def _evaluate_now(self, call: Callable[[], Any], name: str) -> None:
        attempt = self._world.attempt if self._world is not None else None
        words = calls_before_steps.call(f"run.evaluate({name})", sys._getframe(1))
        self._between_steps.call_now(call, words, self._coordinator, self._state, attempt, self._stay)

    def _all_are_at(self, world: World, what: str) -> bool:
        words = calls_before_steps.call(what, sys._getframe(1))
        return self._between_steps.all_are_at(words, self._coordinator, world.attempt)

    def _note_left(self) -> None:
        """The script leaves its loop. Nothing can be raised here: a generator that is dropped has no caller."""
        if self._recovery is not None:
            self._recovery.program.scope.left = self._end_left
        own = {name: value for name, value in self._state.items() if name not in RESERVED}
        try:
            self._switches.keep()
            self._left = LeftState(own, self.step)
        except Exception:
            log.warning("the tracked state could not be read when the loop was left: what changes between the loop and "
                        "run.close() is saved unseen", exc_info=True)  # fmt: skip

    def _end_left(self) -> None:
        """Behind the loop the script begins a collective: the run ends before that. If an error has left the loop, and
        a block around it runs the collective when it is left, the error goes on."""
        error = sys.exception()
        if error is not None and not early_exit.is_done(error):
            raise error
        if self._world is not None:
            self._end_early(self._world)

    def _end_early(self, world: World) -> None:
        """The script has left its loop. Raises `LoopError` unless all ranks have, after the same step."""
        refused = self._recovery.program.scope.refused if self._recovery is not None else None
        early_exit.check_error(self._ended_by or refused, self.step, self._goal)
        early_exit.check_step(self._taken)
        if self._taken is not None and self._taken.phase is Phase.LOST:
            world.go_on(self._taken.phase)
        try:
            if self._left is not None:
                self._left.check()
            if self.step < self._goal:
                world.all_leave()
            done = world.finish()
            while not done and self.step >= self._goal:  # the new member has no step left either, and comes here
                done = world.finish()
        except RuntimeError as e:
            if not world.step_lost(e):
                raise
            done = False
        if not done:
            # The script has left its loop, so it cannot repeat a step in this process.
            log.error("a peer was lost after the loop was left, before the run was saved: this process ends, and a new "
                      "one takes its place")  # fmt: skip
            raise SystemExit(exit_codes.NOT_RECOVERED)
        self._world = None
        refused_end.completed()
        if self._rank == 0 and self.step < self._goal:
            saved = (
                "it is saved there, and goes on from there"
                if self._coordinator.saves
                else "nothing is saved, and it begins anew"
            )
            log.warning("the run's loop was left behind step %d of %d: %s when it is started again", self.step,
                        self._goal, saved)  # fmt: skip

    def _cut(self) -> DataWorld:
        """This process's share of the data, in the present world."""
        size = dist.get_world_size() if self._recovery is not None else self.process.world_size
        return self._shape.reads_as(self._rank, size)

    @property
    def _most_readers(self) -> int:
        """The number of shares of the data in the largest world that the job may have."""
        return max(self._shape.of_sizes(self.process.sizes), default=1)

    def _ask(self, words: str, frame: FrameType) -> None:
        self._between_steps.asks.append(calls_before_steps.call(words, frame))

    def _asks(self) -> list[str]:
        return [*self._between_steps.asks, *calls_before_steps.of_state(self._state, self._shape, self._mesh)]

    def _make_mesh(self, shape: Shape) -> None:
        if shape.readers > 1:
            if self._resharding.made:
                raise LoopError(f"{shape} after a loader or a sampler was made: the ranks of a replica read the same "
                                "data, so make the mesh first")  # fmt: skip
            self._random.share(shape)
        self._requested_shape, (self._shape, self._mesh, named) = shape, make_mesh(self.process, self._recovery, shape)
        self._coordinator.divide(self._shape.model_size, named)
        self._resharding.shape = self._random.shape = self._shape
