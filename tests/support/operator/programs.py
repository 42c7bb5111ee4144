"""What holds for the pods of a simulated job whose template is edited: one world runs one program."""

from __future__ import annotations

from collections.abc import Mapping

from everstep_local.plan.simulation.cluster import World
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state import pod_hash


def all_of_the_present_spec(world: World) -> bool:
    present = pod_hash.of_spec(TrainingJobSpec.model_validate(world.spec))
    return all(pod.spec_hash == present for pod in world.pods.values())


def no_two_programs(world: World, snapshot: Snapshot, before: Mapping[str, WorkerPod]) -> None:
    """No pod is created beside one that runs another program, unless its node is lost. An operator with an old view of
    the spec makes pods from that one."""
    made = [world.pods[name] for name in world.pods.keys() - before.keys()]
    alive = [p for p in world.pods.values() if not p.finished and (p.node is None or snapshot.nodes[p.node].ready)]
    seen = {p.uid for p in snapshot.pods} | {p.uid for p in made}
    for pod in made:
        assert pod.spec_hash == pod_hash.of_spec(snapshot.job.spec)
        others = [p.name for p in alive if p.uid in seen and p.spec_hash not in (None, pod.spec_hash)]
        assert not others, f"{pod.name} was created beside {others} of another program"
