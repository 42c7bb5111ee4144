"""What is built before tests can run, by name. `python -m testcluster.builds RECORD NAME…` builds in the order given.

Each build is kept in the cache and made once, under a lock (`cache.py`). RECORD gets a line of JSON for each one that
ended: `build`, `seconds`, and `problem`, "" if it succeeded. One that fails is tried once more: registries fail for
moments.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from testcluster import kindcluster, programs, stores, versions

TRIES = 2
BUILDS: dict[str, Callable[[], object]] = {  # those that take longest come first
    "control plane": programs.control_plane,
    "oldest API server": lambda: programs.api_server(versions.OLDEST_KUBERNETES),
    "newest API server": lambda: programs.api_server(versions.NEWEST_KUBERNETES),
    "newest scheduler": programs.newest_scheduler,
    "prometheus": programs.prometheus,
    "helm": programs.helm,
    "versitygw": programs.versitygw,
    "fake-gcs-server": programs.fake_gcs_server,
    "etcd": lambda: programs.server("etcd"),
    "azurite": stores.azurite,
    "s3rver": stores.s3rver,
    "monitoring kinds": programs.monitoring_kinds,
    "kueue": lambda: (programs.kueue(), programs.kueue_kinds()),
    "node programs": kindcluster.compile_all,
    "node file systems": kindcluster.bootstrap_all,
}
# Fixture of `tests/conftest.py` → builds that it starts.
OF_FIXTURE = {
    "control_plane": ("control plane", "helm"),
    "oldest_api_server": ("oldest API server",),
    "newest_api_server": ("newest API server",),
    "newest_scheduler": ("newest scheduler",),
    "s3_server": ("versitygw",),
    "careless_s3_server": ("s3rver",),
    "gcs_server": ("fake-gcs-server",),
    "azure_server": ("azurite",),
    "etcd_program": ("etcd",),
    "helm": ("helm",),
    "prometheus_programs": ("prometheus",),
    "monitoring_kinds": ("monitoring kinds",),
    "kueue_programs": ("kueue",),
    "monitoring_kinds_on_nodes": ("monitoring kinds",),
}


def in_order(names: Iterable[str]) -> list[str]:
    """`names` once each, the longest first."""
    wanted = set(names)
    return [name for name in BUILDS if name in wanted]


def _lower_priority() -> None:
    """Tests that run beside the builds take the processors first. What compiles inherits it."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(19)


def _problem_of(make: Callable[[], object]) -> str:
    """Why it failed as often as it was tried; "" if it succeeded."""
    problem = ""
    for _ in range(TRIES):
        try:
            make()
        except Exception as e:
            problem = str(e) or type(e).__name__
            print(problem, file=sys.stderr, flush=True)
        else:
            return ""
    return problem


def main() -> int:
    record, *names = sys.argv[1:]
    _lower_priority()
    failed = False
    for name in names:
        began = time.monotonic()
        problem = _problem_of(BUILDS[name])
        failed = failed or bool(problem)
        line = {"build": name, "seconds": round(time.monotonic() - began, 1), "problem": problem}
        with Path(record).open("a") as out:
            out.write(json.dumps(line) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
