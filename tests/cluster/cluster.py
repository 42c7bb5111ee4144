#!/usr/bin/env python3
"""The test cluster's command line: from a bare machine to a multi-node Kubernetes, and back.

Needs only Python 3.11 and package registries; everything it makes is kept in `$EVERSTEP_CACHE`.
"""

import argparse
import sys
import time

from testcluster import cache, docker, kindcluster, load, programs, project
from testcluster.proc import ClusterError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring the cluster up, or make sure that it is")
    up.add_argument("--stock", action="store_true", help="Kubernetes' own node failure detection: minutes, not seconds")
    up.add_argument("--workers", type=int, default=kindcluster.WORKERS, help="worker nodes of a new cluster")
    commands.add_parser("down", help="delete the cluster")
    commands.add_parser("build", help="make programs and images, start nothing but docker")
    commands.add_parser("programs", help="make only the programs; print their folder")
    commands.add_parser("images", help="build the project's images and load them")
    loading = commands.add_parser("load", help="load images from docker into the nodes")
    loading.add_argument("image", nargs="+")
    commands.add_parser("env", help='print what a shell needs: eval "$(cluster.py env)"')
    commands.add_parser("status", help="nodes and pods")
    return parser


def _dispatch(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "up":
            kindcluster.up(fast=not arguments.stock, workers=arguments.workers)
        case "down":
            kindcluster.down()
        case "build":
            print(kindcluster.build().tag)
        case "programs":
            print(programs.link_all())
        case "images":
            docker.ensure()
            for tag in project.build():
                load.load(tag, nodes=list(kindcluster.containers()))
        case "load":
            for tag in arguments.image:
                load.load(tag, nodes=list(kindcluster.containers()))
        case "env":
            print(f"export KUBECONFIG={kindcluster.kubeconfig()}")
            print(f"export PATH={cache.root() / 'bin'}:$PATH")
        case "status":
            print(kindcluster.status())


def main() -> int:
    arguments = _parser().parse_args()
    began = time.monotonic()
    try:
        _dispatch(arguments)
    except ClusterError as error:
        print(f"cluster.py {arguments.command}: {error}", file=sys.stderr)
        return 1
    if arguments.command not in {"env", "status"}:
        cache.say(time.monotonic() - began, arguments.command, "done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
