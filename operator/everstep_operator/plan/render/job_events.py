"""Makes events from what is new in a status. An event is written only if its status was."""

from __future__ import annotations

from everstep_operator.api.conditions import ConditionType, ReadyReason, Rung
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Status, World
from everstep_operator.object_names import number_of_workers, resizing
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.render import ready_condition, recovery_record, waits
from everstep_operator.plan.snapshot import Snapshot
from everstep_operator.plan.state.facts import Facts


def of_pass(facts: Facts, observed: Status) -> tuple[Event, ...]:
    """The events of a pass: everything that is new."""
    return (*_of_capacity(facts, observed), *_of_nodes(facts, observed), *of_status(facts.snapshot, observed))


def of_queue(facts: Facts, observed: Status) -> tuple[Event, ...]:
    """The event of a job that begins to wait in a queue without having had workers."""
    before, now = facts.job.status.condition(ConditionType.READY), observed.condition(ConditionType.READY)
    waits = now is not None and now.reason == ReadyReason.QUEUED
    if not waits or (before is not None and before.reason == ReadyReason.QUEUED):
        return ()
    return (Event(EventReason.JOB_QUEUED, now.message if now is not None else ""),)


def of_ignored_queue(snapshot: Snapshot, wanted_before: int, wanted: int) -> tuple[Event, ...]:
    """The event of a job that names a queue, and begins without its quota."""
    if snapshot.ignored_queue is None or wanted_before or not wanted:
        return ()
    return (Event(EventReason.QUEUE_IGNORED, ready_condition.ignored_queue(snapshot.ignored_queue)),)


def of_size(change: Publish, wanted_before: int) -> tuple[Event, ...]:
    """The event of another number of workers that is published with a change which has an event of its own."""
    wanted = change.roster.wanted
    announced = change.event is not None and change.event.reason is EventReason.WORLD_RESIZED
    if announced or wanted == wanted_before or 0 in (wanted, wanted_before):
        return ()
    return (Event(EventReason.WORLD_RESIZED, resizing(wanted_before, wanted)),)


def of_move(change: Publish, made: Status) -> tuple[Event, ...]:
    """The event of workers that have left their nodes, with what that cost. Its record is made with the change."""
    if change.recovery is None or change.recovery.rung is not Rung.MIGRATE:
        return ()
    record = made.recoveries[0]
    took = f"all ranks went on {recovery_record.total_ms(record) / 1000:.1f} s after it left its round"
    return (Event(EventReason.WORKER_MIGRATED, f"{change.message}; {took}{_repeated(record.lost_steps)}"),)


def of_status(snapshot: Snapshot, observed: Status) -> tuple[Event, ...]:
    """Events of rounds that formed, recoveries that ended, slow ranks and commits."""
    before = snapshot.job.status
    events = []
    if _formed(before.world, observed.world):
        world = observed.world
        number = world.round if world.formed_round is None else world.formed_round
        workers = number_of_workers(world.size)
        text = (
            f"round {number} formed with {workers}"
            if number
            else f"{workers} {'is' if world.size == 1 else 'are'} ready"
        )
        events.append(Event(EventReason.WORLD_FORMED, text))
    if (
        observed.recoveries != before.recoveries
        and observed.recoveries
        and not recovery_record.is_open(observed.recoveries)
    ):
        events += _recovered(snapshot, observed)
    elif _steps_first(before, observed):
        events += _restored(snapshot)
    slow = observed.progress.straggler
    if slow is not None and slow != before.progress.straggler:
        events.append(Event(EventReason.STRAGGLER_DETECTED, slow))
    return (*events, *_commits(snapshot, observed))


def _of_capacity(facts: Facts, observed: Status) -> tuple[Event, ...]:
    """Events of a job that begins to have too few workers to train, or no node for some of them."""
    before, ready = facts.job.status, observed.condition(ConditionType.READY)
    events = []
    # A job of a fixed size has lost a worker then, and another event reports it.
    waits = ready is not None and ready.reason == ReadyReason.WAITING_FOR_QUORUM and facts.job.spec.elastic is not None
    if waits and observed.world.formed_at is not None and before.holds(ConditionType.QUORUM_REACHED):
        events.append(Event(EventReason.QUORUM_LOST, ready.message if ready is not None else ""))
    attention = observed.condition(ConditionType.NEEDS_ATTENTION)
    begins = observed.holds(ConditionType.NEEDS_ATTENTION) and not before.holds(ConditionType.NEEDS_ATTENTION)
    if begins and ready_condition.starved(facts):
        events.append(Event(EventReason.INSUFFICIENT_CAPACITY, attention.message if attention is not None else ""))
    elif begins and facts.snapshot.name_collisions:
        events.append(Event(EventReason.NAME_TAKEN, facts.snapshot.name_collisions[0]))
    elif begins and attention is not None and facts.snapshot.object_refused and facts.snapshot.create_refused is None:
        events.append(Event(EventReason.CREATE_REFUSED, attention.message))
    elif begins and attention is not None:
        events.append(Event(EventReason.WORKER_WAITS, attention.message))
    return tuple(events)


def _of_nodes(facts: Facts, observed: Status) -> tuple[Event, ...]:
    """Events of nodes that new pods avoid from now on."""
    known = {node.name for node in facts.job.status.excluded_nodes}
    texts = [
        f"new pods avoid node {node.name} {waits.until(facts, node.until)}: {'; '.join(node.reasons)}"
        for node in observed.excluded_nodes
        if node.name not in known
    ]
    return tuple(Event(EventReason.NODE_EXCLUDED, text) for text in texts)


def _formed(before: World, now: World) -> bool:
    if now.formed_at is None:
        return False
    return before.formed_at is None or (before.formed_round, before.size) != (now.formed_round, now.size)


def _recovered(snapshot: Snapshot, observed: Status) -> list[Event]:
    done = observed.recoveries[0]
    if done.rung == Rung.MIGRATE:
        return []  # `of_move` has said it
    if done.rung == Rung.REGROW:
        trains = f"worker {done.worker} trains again: " if done.worker is not None else ""
        whole = f"the world has its {number_of_workers(observed.world.size)}"
        return [Event(EventReason.WORKER_REPLACED, f"{trains}{whole}" if trains else f"{whole} again")]
    size = f" with {number_of_workers(observed.world.size)}" if done.rung == Rung.SHRINK else ""
    size = " with a spare" if done.rung == Rung.SPARE else size
    lost = "lost a process" if done.rung == Rung.RESTART else "was lost"
    events = [
        Event(
            EventReason.WORLD_RESIZED if done.rung == Rung.SHRINK else EventReason.WORKER_REPLACED,
            f"training resumed{size} {recovery_record.total_ms(done) / 1000:.1f} s after worker {done.worker} {lost} "
            f"({done.cause}){_repeated(done.lost_steps)}",
        )
    ]
    return [*events, *_restored(snapshot)]


def _steps_first(before: Status, observed: Status) -> bool:
    """Whether the job has taken its first new step since it began to want workers, or was resumed."""
    since, earlier, now = observed.start_time, before.progress.stepped_at, observed.progress.stepped_at
    return since is not None and now is not None and now >= since and (earlier is None or earlier < since)


def _restored(snapshot: Snapshot) -> list[Event]:
    if (step := snapshot.progress.restored_step) is None:
        return []
    took = snapshot.progress.restore_seconds or 0.0
    text = f"the state after step {step} was restored in {took:.1f} s"
    return [Event(EventReason.RESTORED_FROM_CHECKPOINT, text)]


def _repeated(steps: int | None) -> str:
    if steps is None:
        return ""  # not reported: no text is better than a guess
    return f"; {steps or 'no'} {'step' if steps == 1 else 'steps'} repeated"


def _commits(snapshot: Snapshot, observed: Status) -> list[Event]:
    before = snapshot.job.status
    events = []
    committed = observed.checkpoint.last_committed_step
    if committed is not None and committed != before.checkpoint.last_committed_step:
        events.append(Event(EventReason.CHECKPOINT_COMMITTED, f"committed step {committed}"))
    if observed.checkpoint.healthy is False and before.checkpoint.healthy is not False:
        seen = snapshot.progress
        if seen.checkpoint_error is None and seen.checkpoint_damaged is not None:
            events.append(Event(EventReason.CHECKPOINT_CORRUPT, seen.checkpoint_damaged))
        else:
            message = seen.checkpoint_error or "a commit failed"
            events.append(Event(EventReason.CHECKPOINT_COMMIT_FAILED, message))
    return events
