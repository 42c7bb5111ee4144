"""`python -m release.manifests`: manifests/install.yaml, for whoever installs with kubectl alone.

It is the chart with its default values, rendered by the version of helm that the tests build.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from release.errors import ReleaseError
from release.versions import ROOT
from testcluster import programs
from testcluster.proc import ClusterError

INSTALL = "manifests/install.yaml"
CHART = "charts/everstep"
NAMESPACE = "everstep-system"
HEAD = f"""\
# The chart with its default values, by `make generate`. kubectl apply --server-side -f install.yaml
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
"""
LIMIT = 60.0  # seconds for helm to render or pack the chart


def helm(*arguments: str | Path) -> str:
    """What helm prints; it is built where it was not yet. Raises `ReleaseError` with helm's words."""
    try:
        program = programs.helm()
    except ClusterError as e:
        raise ReleaseError(f"helm could not be built, which renders the chart: {e}") from e
    ended = subprocess.run([program, *arguments], check=False, capture_output=True, text=True, timeout=LIMIT)
    if ended.returncode:
        raise ReleaseError(f"helm {arguments[0]}: {ended.stderr.strip()}")
    return ended.stdout


def install(chart: Path) -> str:
    """The text of install.yaml. Raises `ReleaseError` where the chart cannot be rendered."""
    return HEAD + helm("template", "everstep", chart, "-n", NAMESPACE, "--no-hooks")


def main() -> None:
    (ROOT / INSTALL).write_text(install(ROOT / CHART))


if __name__ == "__main__":
    main()
