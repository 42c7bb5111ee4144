"""An agent in a process of its own, which can be stopped as a machine stops that is frozen.

    agent_process.py INDEX ADDRESS URL TOKEN_FILE TTL

Joins one round of two or three agents, prints a line once it is in it and follows its peers, and stays until its
standard input ends.
"""

from __future__ import annotations

import sys

from everstep.contract.document import Member, Sizes
from everstep.membership.backends.operator_calls import OperatorCalls
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.driver import Driver
from everstep.membership.joining import JoinSettings
from everstep.membership.peers.peer_monitor import PeerMonitor
from everstep.membership.proposals import Patience
from support.rendezvous.agents import LIMIT, until

SIZES = Sizes(2, 3)


def agent(index: int, address: str, url: str, token_file: str, settings: JoinSettings) -> Driver:
    """An agent of the job, in this process and on the machine of this thread."""
    peers = PeerMonitor(f"agent-{index}", address)
    member = Member(index, f"agent-{index}", address=address, link_port=peers.port)
    return Driver(HttpStore(OperatorCalls(url, token_file)), member, SIZES, settings, peers=peers)


def rounds(ttl: float) -> JoinSettings:
    return JoinSettings(patience=Patience(last_call=LIMIT), ttl=ttl)  # all else as it is by default


def is_connected(driver: Driver) -> bool:
    """Whether it has met its neighbours of the round: of one that dies unmet nobody can say that it is gone."""
    peers = driver._peers
    return peers is not None and all(follower._connected for follower in peers._followed.values())


def main() -> None:
    index, address, url, token_file, ttl = sys.argv[1:]
    driver = agent(int(index), address, url, token_file, rounds(float(ttl)))
    driver.join(LIMIT)
    until(lambda: is_connected(driver))
    print("in a round", flush=True)
    sys.stdin.read()
    driver.stop()


if __name__ == "__main__":
    main()
