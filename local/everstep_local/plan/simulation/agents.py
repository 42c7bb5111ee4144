"""The simulated cluster with agents that form rounds, as the round store's document shows them."""

from __future__ import annotations

from dataclasses import replace

from everstep.contract import process_end
from everstep.contract.document import Sizes
from everstep_local.plan.simulation.cluster import TEMPLATE, World
from everstep_operator.api.status import Status
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.plan.snapshot import ReportedProgress
from everstep_operator.plan.state import roster, sizing
from everstep_operator.round_view import ProcessEnd, RoundView
from everstep_operator.rounds.process_ends import with_end


class ElasticWorld(World):
    """A job of 4 workers, at least 2, with the operator's own round store. `form` and `gone-from` are the agents'."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = {
            "replicas": 4,
            "elastic": {"minReplicas": 2, "maxReplicas": 8},
            "rendezvous": {"backend": "everstep"},
            "template": TEMPLATE,
        }
        self.view: RoundView | None = RoundView(0)
        self.unread: RoundView | None = None

    def published(self) -> roster.Roster:
        return roster.from_status(self.status.roster)

    def current(self, index: int) -> str:
        return self.published().name("digits", index) if index in self.published().workers else f"no worker {index}"

    def do_fixed(self) -> None:
        """Without `elastic`: all workers or none."""
        del self.spec["elastic"]

    def do_sizes(self, *sizes: str) -> None:
        self.spec["elastic"]["sizes"] = [int(s) for s in sizes]  # type: ignore[index]

    def do_empty_status(self) -> None:
        self.status = Status()

    def do_etcd(self) -> None:
        """Rounds that the operator cannot see."""
        self.spec["rendezvous"] = {"backend": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}}
        self.view = None

    def do_form(self, *without: str) -> str:
        """The ready agents form a round, if there are enough, `without` those that have no process yet. The round store
        raises the number first."""
        assert self.view is not None
        ready = [
            (p.index, p.incarnation)
            for i in sorted(self.published().workers)
            if (p := self.pods.get(self.current(i))) is not None
            and p.ready
            and p.deleted_at is None
            and str(i) not in without
        ]
        if self.view.keeps and not set(self.view.members).intersection(ready):
            # All members are asked to stop: the first one stays for one round more, and hands the state on.
            ready += [(i, n) for i, n in self.view.members if self._still_trains(i, n)][:1]
        # Like real agents, they use the sizes that were set last, not those of the present spec.
        sizes = self.view.sizes or sizing.bounds(TrainingJobSpec.model_validate(self.spec))
        size = sizes.largest(len(ready))
        if size == 0:
            return "no round"
        number = max(self.view.round, self.status.world.round) + 1
        self.status = self.status.model_copy(update={"world": self.status.world.model_copy(update={"round": number})})
        before, left = dict(self.view.members), set(self.view.left)
        ready.sort(key=lambda m: (before.get(m[0]) != m[1], m[0]))  # survivors first, as the agents choose
        joining = tuple(sorted(i for i, _ in ready[size:]))
        left = (left | set(self.view.members)) - set(ready)
        left_at = self.now if left - set(self.view.left) else self.view.left_at
        self.view = RoundView(
            number, tuple(sorted(ready[:size])), joining=joining, keeps=self.view.keeps, sizes=self.view.sizes,
            surge=self.view.surge, left=tuple(sorted(left)), left_at=left_at, ends=self.view.ends,
            drained=frozenset(m for m in left if m in self.view.drained or self._leaves(*m)),
        )  # fmt: skip
        return f"round {number}: {' '.join(f'w{i}-{n}' for i, n in self.view.members)}"

    def _leaves(self, index: int, incarnation: int) -> bool:
        """Whether the worker trains until the others can go on without it."""
        return self._still_trains(index, incarnation) and self.pods[self.current(index)].deleted_at is not None

    def _still_trains(self, index: int, incarnation: int) -> bool:
        pod = self.pods.get(self.current(index))
        return pod is not None and pod.incarnation == incarnation and pod.ready and not pod.finished

    def do_wait(self, *indexes: str) -> None:
        """These agents wait for the next round, with their programs loaded, and no others."""
        assert self.view is not None
        left = tuple((i, n) for i, n in self.view.left if str(i) not in indexes)
        self.view = replace(self.view, joining=tuple(sorted(map(int, indexes))), left=left)

    def do_keep_processes(self) -> None:
        """The processes keep their memory from round to round."""
        assert self.view is not None
        self.view = replace(self.view, keeps=True)

    def do_gone_from(self, *indexes: str) -> None:
        """The agents report that these are no longer in the round."""
        assert self.view is not None
        self.view = replace(self.view, gone=tuple(sorted({*self.view.gone, *map(int, indexes)})))

    def do_kill_process(self, index: str, why: str = "SIGKILL") -> None:
        """The training process of this worker ends, and its agent leaves the round to start another."""
        assert self.view is not None
        number = int(index)
        self.do_gone_from(index)
        replaced = process_end.read(process_end.of_rank(number, why))
        assert replaced is not None
        incarnation = self.published().workers[number].number
        end = ProcessEnd(self.view.round, number, incarnation, self.now, replaced.detail, replaced.stood_seconds)
        self.view = replace(self.view, ends=with_end(self.view.ends, end))

    def do_close(self) -> None:
        assert self.view is not None
        self.view = replace(self.view, closed="finished", finished=True)

    def do_close_for(self, why: str) -> None:
        assert self.view is not None
        self.view = replace(self.view, closed=why)

    def do_step(self, step: str, restored: str = "") -> None:
        before = self.progress
        super().do_step(step, restored)
        if self.view is not None:
            first = before.round != self.view.round
            self.progress = replace(
                self.progress, round=self.view.round, step_before=before.step if first else before.step_before
            )

    def do_roster(self) -> str:
        return str(self.published())

    def take_sizes(self, sizes: Sizes, surge: int) -> None:
        assert self.view is not None
        self.view = replace(self.view, sizes=sizes, surge=surge)

    def begin_rounds(self, sizes: Sizes, after: int) -> None:
        if self.view is not None and self.view.closed is not None and self.view.round == after:
            self.view = RoundView(0, sizes=sizes)

    def take_status(self, status: Status) -> None:
        if status.rerun > self.status.rerun:
            self.progress = ReportedProgress()
        self.status = status  # progress is of the agents' rounds, not of the operator's

    def do_untold_step(self, step: str) -> None:
        """Reports of processes that do not know their round."""
        super().do_step(step)
        self.progress = replace(self.progress, round=0)

    def do_operator_restart(self) -> None:
        """A new operator starts: it has no reports, and has not read the round yet."""
        self.unread = None if self.view is None else replace(self.view, ends=())
        self.progress, self.view = ReportedProgress(), None

    def do_round_read(self) -> None:
        self.view = self.unread
