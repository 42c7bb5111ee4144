"""manifests/install.yaml is the chart as it is now, and a real API server takes each object of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

import everstep
from release import manifests
from support import ROOT

pytestmark = pytest.mark.apiserver


def test_install_manifest_is_the_chart_and_taken_by_the_api_server(crd: Any) -> None:
    text = (ROOT / manifests.INSTALL).read_text()
    assert text == manifests.install(ROOT / manifests.CHART), f"{manifests.INSTALL}: run `make generate`"
    assert f'image: "everstep/operator:{everstep.__version__}"' in text
    namespace, *rest = [one for one in yaml.safe_load_all(text) if one]
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", manifests.NAMESPACE)
    crd.kubectl("create", "namespace", manifests.NAMESPACE)  # a dry run makes none, and the others are in it
    try:
        done = crd.kubectl(
            "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o", "name", "-f", "-", input=text
        )
    finally:
        crd.kubectl("delete", "namespace", manifests.NAMESPACE, "--wait=false")
    assert done.returncode == 0, done.stderr
    kinds = [re.sub(r"[./].*", "", line) for line in done.stdout.splitlines()]
    assert kinds == [one["kind"].lower() for one in (namespace, *rest)]
