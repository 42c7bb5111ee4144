"""A simulated cluster around the pure planner: plans are carried out at once, and commands cause faults between passes.

`everstep plan --replay` and the planner's tests play transcripts on it.
"""

from __future__ import annotations

import copy
import shlex
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from everstep.contract import exit_codes, labels
from everstep.contract.document import Sizes
from everstep_local.plan.simulation.commands import COMMANDS
from everstep_local.plan.simulation.queueing import Kueue
from everstep_operator.api.parse import parse_status
from everstep_operator.api.status import Status
from everstep_operator.api.types import GangScheduler, TrainingJobSpec
from everstep_operator.plan.actions import (
    Action,
    BeginRounds,
    CreateDisruptionBudget,
    CreateNetworkPolicy,
    CreatePod,
    CreatePodGroup,
    CreateService,
    DeleteDisruptionBudget,
    DeleteJob,
    DeleteNetworkPolicy,
    DeletePod,
    DeletePodGroup,
    DeleteService,
    PatchPodGroup,
    SetSizes,
)
from everstep_operator.plan.explain import explain
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.planner import plan
from everstep_operator.plan.render.network_policy import OPEN_PORTS
from everstep_operator.plan.render.pod_group import MADE_OF, least_of
from everstep_operator.plan.snapshot import (
    DisruptionBudgetView,
    Exit,
    Fleet,
    InitFailure,
    JobView,
    NetworkPolicyView,
    NodeHealth,
    NodeView,
    PodGroupView,
    PodPhase,
    ReportedProgress,
    Settings,
    Snapshot,
    WorkerPod,
)
from everstep_operator.plan.stages import StageName
from everstep_operator.round_view import RoundView

START = datetime(2026, 1, 1, tzinfo=UTC)
TEMPLATE = {
    "spec": {"containers": [{"name": "worker", "image": "example/train:1", "command": ["torchrun", "train.py"]}]}
}
LITERALS = {"true": True, "false": False}


@dataclass(frozen=True)
class Cut:
    """Where an operator dies, and which actions the API server refuses: exactly the states that production can leave
    behind. `stage`: how many stages end; None: all of them, and the operator lives. In the next stage action i is done
    if bit i of `done` is set. In the stages before it, action i of all fails if bit i of `fails` is set. `written`
    False: it dies before the status is written.
    """

    stage: int | None = None
    done: int = 0
    fails: int = 0
    written: bool = True


WHOLE = Cut()


class World:
    """One job and its pods. `run` takes one command line of a transcript and returns what it printed."""

    def __init__(self) -> None:
        self.now = START
        self.spec: dict[str, object] = {"replicas": 2, "rendezvous": {"backend": "c10d"}, "template": TEMPLATE}
        self.status = Status()
        self.pods: dict[str, WorkerPod] = {}
        self.faults: dict[str, tuple[str, ...]] = {}
        self.accused: dict[str, datetime] = {}
        self.nodes = {f"n{i}": NodeView(f"n{i}", NodeHealth.READY, START) for i in (1, 2)}
        self.service: str | None = None
        self.progress = ReportedProgress()
        self.deleting = False
        self.refused: str | None = None
        self.object_refused: str | None = None
        self.collisions: tuple[str, ...] = ()
        self.uids = 0
        self.answering: frozenset[str] = frozenset()
        self.view: RoundView | None = None
        self.disruption_budget: DisruptionBudgetView | None = None
        self.network_policy: NetworkPolicyView | None = None
        self.pod_groups: dict[GangScheduler, PodGroupView] = {}
        self.settings = Settings()
        self.side_cars: set[str] = set()
        self.pods_linger = False
        self.generation = 1
        self.migrate: frozenset[str] = frozenset()
        self.kueue = Kueue(lambda: self.now)
        self.ignored_queue: str | None = None
        self.selectors: dict[str, object] = {}  # of nodes, by the names of pods that ask for some

    def snapshot(self) -> Snapshot:
        # The status goes through the wire format, as in the API server: fields that are lost there must not matter.
        job = JobView(
            "default",
            "digits",
            "uid-1",
            self.generation,
            "1",
            TrainingJobSpec.model_validate(self.spec),
            parse_status(self.status.to_wire()),
            START,
            self.deleting,
            self.migrate,
        )
        return Snapshot(
            self.now,
            job,
            tuple(self.pods[name] for name in sorted(self.pods)),
            self.service,
            dict(self.nodes),
            self.progress,
            self.collisions,
            self.refused,
            world=self.view,
            disruption_budget=self.disruption_budget,
            answering=self.answering,
            object_refused=self.object_refused,
            network_policy=self.network_policy,
            pod_groups=tuple(self.pod_groups.values()),
            settings=self.settings,
            queue=self.kueue.view(),
            ignored_queue=self.ignored_queue,
            fleet=Fleet({name: node.ready for name, node in self.nodes.items()}, dict(self.faults), dict(self.accused)),
        )

    def reconcile(self) -> str:
        snapshot = self.snapshot()
        decided = plan(snapshot)
        text = explain(snapshot, decided)
        self.apply(decided)
        return text

    def apply(self, decided: Plan, cut: Cut = WHOLE) -> None:
        """Carry out the plan as `controller.apply` does, or a part of it if the operator dies."""
        if not cut.written:
            return
        opened = decided.status.recoveries != self.status.recoveries
        self.take_status(decided.status)
        if opened and decided.status.recoveries and decided.status.recoveries[0].first_step_ms is None:
            noticed_at = decided.lost.at if decided.lost is not None else None
            # As the reconciler does in JobProgress.
            self.progress = replace(self.progress, lost_at=noticed_at or self.now)
        failed: set[StageName] = set()
        number = 0
        for position, stage in enumerate(decided.stages):
            if not stage.may_begin(failed):
                failed.add(stage.name)
                continue
            if cut.stage is not None and position >= cut.stage:
                for bit, action in enumerate(stage.actions):
                    if cut.done >> bit & 1:
                        self.act(action)
                return
            for action in stage.actions:
                if cut.fails >> number & 1:
                    failed.add(stage.name)
                else:
                    self.act(action)
                number += 1

    def act(self, action: Action) -> None:
        match action:
            case CreateService() | DeleteService():
                self.service = "s1" if isinstance(action, CreateService) else None
            case CreateDisruptionBudget() | DeleteDisruptionBudget() | CreateNetworkPolicy() | DeleteNetworkPolicy():
                self._guard(action)
            case CreatePodGroup() | PatchPodGroup() | DeletePodGroup():
                self._group(action)
            case CreatePod(name, index, incarnation, body):
                if name not in self.pods and self.refused is None:
                    self.uids += 1
                    marks = body["metadata"]["labels"]
                    if selector := body["spec"].get("nodeSelector"):
                        self.selectors[name] = selector
                    label = marks.get(labels.ROUND)
                    node = self._scheduled(index)
                    self.pods[name] = WorkerPod(
                        name,
                        f"p{self.uids}",
                        index,
                        incarnation,
                        None if label is None else int(label),
                        PodPhase.PENDING,
                        node=node,
                        created_at=self.now,
                        spec_hash=marks.get(labels.SPEC_HASH),
                        scheduled_at=self.now,
                    )
            case DeletePod():
                self._delete_pod(action)
            case DeleteJob():
                pass  # the transcript shows it, and ends there
            case SetSizes(sizes, _, surge):
                self.take_sizes(sizes, surge)
            case BeginRounds(sizes, after, _):
                self.begin_rounds(sizes, after)
            case _:
                self.kueue.act(action)

    def _delete_pod(self, action: DeletePod) -> None:
        name = action.name
        if name not in self.pods or self.pods[name].uid != action.uid:
            return  # a successor has its name
        if self.pods_linger and action.grace_seconds > 0 and not self.pods[name].finished:
            self.change(name, deleted_at=self.pods[name].deleted_at or self.now)
        else:
            del self.pods[name]

    def _scheduled(self, index: int) -> str:
        """The node of a new pod: not one that its pods have to leave, if there is another."""
        nodes = [f"n{1 + index % 2}", f"n{2 - index % 2}"]
        return next((n for n in nodes if n in self.nodes and self.nodes[n].leaving is None), nodes[0])

    def _guard(
        self,
        action: CreateDisruptionBudget | DeleteDisruptionBudget | CreateNetworkPolicy | DeleteNetworkPolicy,
    ) -> None:
        match action:
            case CreateDisruptionBudget(_, body, _):
                self.disruption_budget = DisruptionBudgetView("b1", body["spec"]["minAvailable"])
            case DeleteDisruptionBudget():
                self.disruption_budget = None
            case CreateNetworkPolicy(_, body, _):
                self.network_policy = NetworkPolicyView("n1", body["metadata"]["annotations"][OPEN_PORTS])
            case DeleteNetworkPolicy():
                self.network_policy = None

    def _group(self, action: CreatePodGroup | PatchPodGroup | DeletePodGroup) -> None:
        match action:
            case CreatePodGroup(scheduler, _, body, _):
                least, made_of = least_of(scheduler, body["spec"]), body["metadata"]["annotations"][MADE_OF]
                self.pod_groups.setdefault(scheduler, PodGroupView(scheduler, "g1", least, made_of))
            case PatchPodGroup(scheduler, _, _, spec, _):
                if (group := self.pod_groups.get(scheduler)) is not None:
                    self.pod_groups[scheduler] = replace(group, least=least_of(scheduler, spec))
            case DeletePodGroup(scheduler):
                self.pod_groups.pop(scheduler, None)

    def take_sizes(self, sizes: Sizes, surge: int) -> None:
        raise AssertionError(f"this job has no agents that could use the sizes {sizes}")

    def begin_rounds(self, sizes: Sizes, after: int) -> None:
        raise AssertionError(f"this job has no rounds that could begin anew after {after} with the sizes {sizes}")

    def take_status(self, status: Status) -> None:
        if status.rerun > self.status.rerun:  # as the reconciler does
            self.progress = ReportedProgress(round=self.progress.round)
        if status.world.round > self.status.world.round:
            # As JobProgress does: a new round starts with no reports of its own.
            keep = {
                n: getattr(self.progress, n)
                for n in ("step", "stepped_at", "updated_at", "committed_step", "committed_at", "lost_at")
            }
            self.progress = ReportedProgress(round=status.world.round, **keep)
        self.status = status

    def current(self, index: int) -> str:
        return f"digits-w{index}-{self.status.world.round - 1}"

    def change(self, name: str, **fields: object) -> None:
        pod = replace(self.pods[name], **fields)  # type: ignore[arg-type]
        if name in self.side_cars and pod.over and pod.exit is not None and pod.reason is None:
            pod = replace(pod, phase=PodPhase.RUNNING)
        self.pods[name] = pod

    def run(self, line: str) -> str:
        """Run one command. An unknown command is an error of the transcript."""
        verb, *args = shlex.split(line)
        if verb in COMMANDS:
            return COMMANDS[verb](self, *args) or ""
        command = getattr(self, "do_" + verb.replace("-", "_"), None)
        if command is None:
            raise ValueError(f"unknown command {verb!r}")
        return command(*args) or ""

    def do_job(self, *fields: str) -> None:
        for field in fields:
            path, _, value = field.partition("=")
            target = self.spec
            *parents, leaf = path.split(".")
            for parent in parents:
                target = target.setdefault(parent, {})  # type: ignore[assignment]
            target[leaf] = LITERALS[value] if value in LITERALS else int(value) if value.isdigit() else value

    def do_rule(self, kind: str, value: str, action: str) -> None:
        values = [int(v) if v.isdigit() else v for v in value.split(",")]
        rules = self.spec.setdefault("recovery", {}).setdefault("rules", [])  # type: ignore[attr-defined]
        rules.append({kind: values, "action": action})

    def do_reconcile(self) -> str:
        return self.reconcile()

    def do_settle(self) -> str:
        """Reconcile until nothing changes; prints the last status only."""
        for _ in range(10):
            text = self.reconcile()
            if text.startswith("nothing"):
                break
        return text

    def do_ready(self, *indexes: str) -> None:
        for index in indexes:
            name = self.current(int(index))
            since = self.pods[name].ready_at if self.pods[name].ready else self.now
            started = self.pods[name].started_at or self.now
            self.change(
                name,
                phase=PodPhase.RUNNING,
                ready=True,
                ready_at=since,
                started_at=started,
                waiting=None,
                joining=False,
                starting=None,
                unschedulable=None,
            )

    def do_runs(self, *indexes: str) -> None:
        """The container runs, and its worker has not joined a round: the probe of its start has not succeeded."""
        for index in indexes:
            name = self.current(int(index))
            self.change(name, phase=PodPhase.RUNNING, ready=False, started_at=self.now, starting=None, joining=True)

    def do_succeed(self, *indexes: str) -> None:
        for index in indexes:
            exit_ = Exit(0, "Completed", finished_at=self.now)
            self.change(self.current(int(index)), phase=PodPhase.SUCCEEDED, ready=False, exit=exit_)

    def do_fail(self, index: str, code: str = "1", message: str = "", reason: str = "Error") -> None:
        exit_ = Exit(int(code), reason, message.replace("\\n", "\n"), self.now)
        self.change(self.current(int(index)), phase=PodPhase.FAILED, ready=False, exit=exit_)

    def do_evict(self, index: str, message: str = "") -> None:
        pod = self.current(int(index))
        self.change(pod, phase=PodPhase.FAILED, ready=False, reason="Evicted", message=message or None)

    def do_reject(self, index: str, reason: str = "UnexpectedAdmissionError", message: str = "") -> None:
        """The kubelet does not let the pod run."""
        pod = self.current(int(index))
        self.change(pod, phase=PodPhase.FAILED, ready=False, reason=reason, message=message or None)

    def do_side_car(self, *indexes: str) -> None:
        """These pods have a side-car that never ends."""
        self.side_cars |= {self.current(int(index)) for index in indexes}

    def do_obey(self, index: str) -> None:
        """The pod is asked to stop, and its program ends with exit code 0."""
        name = self.current(int(index))
        self.change(name, deleted_at=self.now)
        self.change(name, phase=PodPhase.SUCCEEDED, ready=False, exit=Exit(0, "Completed", finished_at=self.now))

    def do_delete(self, index: str) -> None:
        self.change(self.current(int(index)), deleted_at=self.now)

    def do_pods_linger(self) -> None:
        """From now on a deleted pod takes its time to end: until `end`, or until it is deleted without grace."""
        self.pods_linger = True

    def do_end(self, *names: str) -> None:
        """These pods have ended and are gone; without an argument all that were deleted."""
        for name in names or [n for n, pod in self.pods.items() if pod.deleted_at is not None]:
            del self.pods[name]

    def do_image(self, image: str) -> None:
        """The template is edited."""
        template = copy.deepcopy(self.spec["template"])
        template["spec"]["containers"][0]["image"] = image  # type: ignore[index]
        self.spec = {**self.spec, "template": template}

    def do_gone(self, index: str) -> None:
        del self.pods[self.current(int(index))]

    def do_unschedulable(self, index: str, why: str = "0/2 nodes are available") -> None:
        self.change(self.current(int(index)), node=None, unschedulable=why, scheduled_at=None)

    def do_schedule(self, node: str, *indexes: str) -> None:
        """The pods that waited for a node have found this one."""
        for index in indexes:
            self.change(self.current(int(index)), node=node, unschedulable=None, scheduled_at=self.now)

    def do_starts(self, index: str, what: str = "ContainerCreating") -> None:
        """The pod has not started yet, and no fault is known."""
        self.change(self.current(int(index)), starting=what)

    def do_waits(self, index: str, why: str) -> None:
        self.change(self.current(int(index)), waiting=why)

    def do_init_fails(self, index: str, container: str, code: str = "1", message: str = "") -> None:
        failed = InitFailure(container, int(code), "Error", message.replace("\\n", "\n"), self.now)
        self.change(self.current(int(index)), phase=PodPhase.FAILED, ready=False, init_failure=failed)

    def do_node_lost(self, name: str) -> None:
        self.nodes[name] = NodeView(name, NodeHealth.SILENT, self.now, "NodeStatusUnknown")

    def do_node_not_ready(self, name: str) -> None:
        """Its kubelet says so; the containers go on."""
        self.nodes[name] = NodeView(name, NodeHealth.NOT_READY, self.now, "KubeletNotReady")

    def do_node_gone(self, name: str) -> None:
        del self.nodes[name]

    def do_node_leaves(self, name: str, why: str = "is removed by the cluster's autoscaler") -> None:
        """Its pods have to leave it; without words because the autoscaler removes it."""
        self.nodes[name] = replace(self.nodes[name], leaving=why)

    def do_node_stays(self, name: str) -> None:
        self.nodes[name] = replace(self.nodes[name], leaving=None)

    def do_node_fault(self, name: str, *faults: str) -> None:
        """Its status speaks against it; without words no more."""
        self.faults = {**{n: f for n, f in self.faults.items() if n != name}, **({name: faults} if faults else {})}

    def do_accused(self, name: str, seconds: str) -> None:
        """Other jobs avoid the node for so long."""
        self.accused = {**self.accused, name: self.now + timedelta(seconds=float(seconds))}

    def do_migrate(self, *indexes: str) -> None:
        """A person wants these pods on other nodes."""
        self.migrate |= {self.current(int(index)) for index in indexes}

    def do_preempted(self, *indexes: str) -> None:
        """They were asked to stop, and have ended; the others go on."""
        for index in indexes:
            exit_ = Exit(exit_codes.PREEMPTED, "Error", finished_at=self.now)
            self.change(self.current(int(index)), phase=PodPhase.FAILED, ready=False, exit=exit_)

    def do_answer(self, *indexes: str) -> None:
        """The agents of these workers alone renew their presence from now on."""
        self.answering = frozenset(self.pods[self.current(int(index))].uid for index in indexes)

    def do_node_back(self, name: str) -> None:
        self.nodes[name] = NodeView(name, NodeHealth.READY, self.now)

    def do_advance(self, seconds: str) -> None:
        self.now += timedelta(seconds=float(seconds))

    def do_step(self, step: str, restored: str = "") -> None:
        """All ranks of the round have restored and completed `step`, the first since they restored."""
        self.progress = replace(
            self.progress,
            round=self.status.world.round,
            step=int(step),
            stepped_at=self.now if int(step) > (self.progress.step or 0) else self.progress.stepped_at,
            updated_at=self.now,
            started_at=self.now,
            restored_at=self.now,
            restored_step=int(restored) if restored else None,
            resumed_step=int(restored) if restored else int(step) - 1,
            restore_seconds=0.25,
            trained_at=self.now,
            first_step_at=self.now + timedelta(milliseconds=50),
        )

    def do_refuse(self, reason: str = "") -> None:
        self.refused = reason or None
