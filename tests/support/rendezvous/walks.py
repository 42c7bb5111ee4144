"""Random lives of a simulated job: what may happen, in which proportions, and then peace."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from everstep.contract.document import Sizes
from everstep.membership.commands import (
    Break,
    Charge,
    CloseJob,
    Command,
    Done,
    Drain,
    Evict,
    Form,
    KeepProcesses,
    Leave,
    Reach,
    SetBoundary,
    Stop,
    Waited,
    Withdraw,
)
from support.rendezvous.world import Agent, Violation, World


def events(world: World, agent: Agent, target: Agent, number: int) -> Iterator[Command]:
    """What an agent may do that believes to be in round `number`."""
    yield Evict(agent.name, number, target.name, "test")
    yield Reach(agent.name, number, target.name, False)
    yield Reach(agent.name, number, target.name, True)
    yield Form(agent.name, number, Waited.REJOIN)
    yield SetBoundary(agent.name, number, 7)
    yield Withdraw(agent.name, number, "test")
    yield Drain(agent.name, number)
    yield Break(agent.name, number, "test")
    yield KeepProcesses(agent.name, number)
    yield Done(agent.name, number)


def step(world: World, random: Random) -> None:
    """One thing that may happen."""
    if not world.agents or random.random() < 0.08:
        index = random.choice([-1, 0, 1, 2])
        world.start(index, random.randrange(3) if index >= 0 else 0)
        return
    agent, target = (random.choice(list(world.agents.values())) for _ in range(2))
    number = 0 if agent.seen[1] is None else agent.seen[1].round
    if agent.round is not None:
        number = agent.round.number
    if random.random() < 0.25:
        for event in events(world, agent, target, number):
            world.stray(agent, event, number)
    if random.random() < world.written_for:
        world.write_join_requests(random.choice([0, 0, 0, 1, 2]))
        return
    if not agent.alive and random.random() < 0.9:  # else it only seemed dead
        return
    choice = random.random()
    if choice < 0.15:
        world.announce(agent)
    elif choice < 0.45:
        world.look(agent, random.choice([0, 0, 0, 0, 1, 2, 5]))
    elif choice < 0.55:
        world.read_presence(agent)
    elif choice < 0.80:
        waited = Waited(random.choice([0, 0, 0, 1, 2]))
        world.join(agent, waited, random.random() < 0.2, random.random() < 0.7)
    elif choice < 0.85:
        world.again(agent)
    elif choice < 0.91:
        world.act(agent, random.choice(list(events(world, agent, target, number))))
    elif choice < 0.93:
        world.look(agent, 0)
        world.act(agent, random.choice((Stop(agent.name), Drain(agent.name, number))))
    elif choice < 0.96:
        world.crash(agent)
    elif choice < 0.98:
        world.expire(agent)
    elif choice < 0.99:
        world.act(agent, random.choice((Leave(agent.name), Charge(agent.name, number, "test"))))
    elif random.random() < 0.5:
        world.rule(random.choice(SIZES))
    elif random.random() < 0.2:
        world.act(agent, CloseJob(agent.name, "done"))


SIZES = (Sizes(1, 3), Sizes(2, 3), Sizes(2, 2), Sizes(2, 6, (2, 4, 6)))


def walk(seed: int, steps: int = 120) -> World:
    """A random life of a job, then peace. Raises Violation with the seed and what was written."""
    random = Random(seed)
    world = World(random.choice(SIZES))
    world.written_for = random.choice([0.0, 0.0, 0.1, 0.3])
    try:
        for _ in range(steps):
            step(world, random)
        world.settle()
    except Violation as e:
        raise Violation(f"walk({seed}, {steps}): {e}\n" + "\n".join(world.log[-25:])) from None
    return world
