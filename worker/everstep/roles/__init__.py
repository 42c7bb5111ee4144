"""Roles in one job: a process that keeps the state, and others that ask it, each of which may be lost alone.

The processes of a world wait for each other in collectives, so a loss interrupts all of them. A parameter server and
its workers, or a learner and the processes that make its rollouts, are no world: each is a process of its own, started
by `python`. One of them has a `Hub`, and the others `follow` it.

Knows neither training nor checkpoints. Invariants: one connection is one life of a peer, so nothing that was asked on a
lost connection is asked again by itself; no message is unpickled.
"""

from everstep.roles.following import Ask, follow
from everstep.roles.hub import Hub
from everstep.roles.wire import HubLost, RolesError

__all__ = ["Ask", "Hub", "HubLost", "RolesError", "follow"]
