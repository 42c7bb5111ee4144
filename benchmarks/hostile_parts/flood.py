"""One kind of hostile load, from a process of its own.  flood.py MIX PORT RATE SECONDS < tokens as JSON

Prints what it sent, what it could not send because all its connections waited, and the answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import sys
from collections.abc import Callable

from wire import Flood, bad, chunks, half_sent, read, report, slow_head

PODS = 8  # as many addresses as the other tenant has pods
# Which tokens, which request, how many connections at most, and from how many addresses.
MIXES: dict[str, tuple[str, Callable[[str], bytes], int, int]] = {
    "forged": ("forged", report, 1000, PODS),
    "expired": ("expired", report, 1000, PODS),
    "half_sent": ("hostile", half_sent, 1000, PODS),
    "bad_json": ("hostile", bad, 64, PODS),
    "reports": ("hostile", report, 1000, PODS),
    "reads": ("hostile", read, 1000, PODS),
    "chunks": ("hostile", chunks, 64, PODS),
    "slow_heads": ("hostile", slow_head, 1000, 60),
}


async def main() -> None:
    mix, port, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    whose, make, most, addresses = MIXES[mix]
    requests = itertools.cycle([make(token) for token in json.load(sys.stdin)[whose]])
    flood = Flood(port, requests, rate, most, addresses)
    await flood.run(seconds)
    print(json.dumps({"sent": flood.sent, "held_back": flood.held_back, "answers": dict(flood.answers)}))


if __name__ == "__main__":
    os.nice(5)  # it stands for other machines: it may not take the operator's core
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    asyncio.run(main())
