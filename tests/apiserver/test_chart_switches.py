"""Whatever part of the chart is on or off, a real API server takes what is left, and warns of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support import ROOT

pytestmark = pytest.mark.apiserver


def _switches(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """Each value of the chart that is on or off, by its path."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _switches(value, f"{path}{name}.")
        elif isinstance(value, bool):
            yield f"{path}{name}", value


SWITCHES = dict(_switches(yaml.safe_load((ROOT / "charts/everstep/values.yaml").read_text())))
# Some switches need other values: the chart refuses them alone, and says which.
ALSO = {"page.ingress.enabled": ("page.enabled=true", "page.ingress.host=jobs.example.com")}
EXCLUDED = {"all on": "metrics.serviceMonitor.enabled=false"}  # beside the other monitor each replica is scraped twice
NAMED = ("serviceAccount.name=mine", "page.ingress.host=jobs.example.com")


@pytest.mark.parametrize("switched", [*SWITCHES, "all on", "all off"])
@pytest.mark.long_but("all on")
def test_chart_with_each_of_its_switches_turned_is_accepted_by_the_api_server(
    monitoring_kinds: Any, helm: Any, switched: str
) -> None:
    """None of them makes an object that a version of Kubernetes refuses, or warns of."""
    if switched in SWITCHES:
        values = [f"{switched}={str(not SWITCHES[switched]).lower()}", *ALSO.get(switched, ())]
    else:
        values = [*(f"{name}={str(switched == 'all on').lower()}" for name in SWITCHES), *NAMED]
        values += [EXCLUDED[switched]] if switched in EXCLUDED else []
    sets = [part for value in values for part in ("--set", value)]
    manifest = helm("template", "everstep", "-n", "default", "--no-hooks", *sets).stdout
    flags = ("--dry-run=server", "--server-side", "--force-conflicts", "--validate=strict")
    done = monitoring_kinds.kubectl("apply", *flags, "-f", "-", input=manifest)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), "no warnings"
