"""A node that is lost with a worker and the operator's leader on it: how long the other workers have no round.

    python benchmarks/silent_node.py [--quick] [--json PATH] [--trials N] [--fault silent|frozen]

Machines are network namespaces of this kernel. One is lost and nobody is told. `silent`: nothing comes from it any
more. `frozen`: its kernel accepts and acknowledges, and none of its processes runs. Two agents are left, and one
replica of the operator, behind an address that picks either replica for each connection, as a Service does. `heard`:
until both know that their round is over; `formed`: until both are in the next, and can train. Needs root, `ip` and
`iptables`. Leases and patience are those of a new installation.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
from figures import Better, Figure, finish, parser, quantile

from support.network.silent_machines import LostNode, in_turn
from testcluster import packages

FAULTS = {"silent": LostNode.cut, "frozen": LostNode.freeze}
GOALS = {"heard": None, "formed": 4.0}


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--trials", type=int, default=20)
    p.add_argument("--fault", choices=FAULTS, action="append", help="this one alone")
    args = p.parse_args()
    trials = 1 if args.quick else args.trials
    packages.ensure(packages.NETWORKS, "this benchmark's network")
    figures = []
    for fault in args.fault or FAULTS:
        with tempfile.TemporaryDirectory() as folder, in_turn(Path(folder), trials, FAULTS[fault]) as measure:
            taken = [measure() for _ in range(trials)]
        for part, goal in GOALS.items():
            seconds = [one[part] for one in taken]
            name = f"{fault}_node.{part}"
            figures.append(Figure(f"{name}.p50", quantile(seconds, 0.5), "s", Better.LOWER, trials, goal))
            figures.append(Figure(f"{name}.max", max(seconds), "s", Better.LOWER, trials))
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
