"""A Prometheus on the loopback that scrapes operators of this machine each second, and evaluates rules as often."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster import programs
from testcluster.daemon import Daemon, free_ports
from testcluster.proc import ClusterError

REPLY_LIMIT = 30.0  # seconds for an answer
INTERVAL = "1s"
JOB = "everstep"  # the scrape job whose series are kept
# Each format of the operator's metrics is scraped by a job that accepts no other.
FORMATS = {"openmetrics": "OpenMetricsText1.0.0", "text": "PrometheusText0.0.4"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """`targets` are hosts with ports, `rules` files of rules. Series have the labels that the chart's PodMonitor leaves
    them: `namespace` is a job's own where it has one."""

    def __init__(self, folder: Path, targets: Sequence[str], rules: Sequence[Path] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        static = [{"targets": list(targets), "labels": {"namespace": "everstep-system"}}]
        dropped = [{"source_labels": ["__name__"], "regex": ".*", "action": "drop"}]
        scraped = {"honor_labels": True, "static_configs": static}
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": JOB, **scraped},
                *(
                    {"job_name": name, "scrape_protocols": [protocol], "metric_relabel_configs": dropped, **scraped}
                    for name, protocol in FORMATS.items()
                ),
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config, indent=1))  # JSON is YAML
        argv = [
            str(programs.prometheus() / "prometheus"), f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn",
        ]  # fmt: skip
        self._daemon = Daemon(argv, folder / "prometheus.log", self._ready)

    def start(self) -> None:
        self._daemon.start()

    def stop(self) -> None:
        self._daemon.kill()  # nothing of it is used again

    def query(self, expression: str) -> list[Sample]:
        """The series that it gives now. Raises `ClusterError` with Prometheus' words where it cannot be evaluated."""
        data = self._get("/api/v1/query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in data["result"]]

    def scrape_errors(self) -> dict[str, str]:
        """Of each scrape job the last error; "" where there is none."""
        targets = self._get("/api/v1/targets", state="active")["activeTargets"]
        return {one["labels"]["job"]: one["lastError"] for one in targets}

    def firing(self) -> list[dict[str, str]]:
        """The labels of the alerts that fire."""
        return [one["labels"] for one in self._get("/api/v1/alerts")["alerts"] if one["state"] == "firing"]

    def _ready(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/-/ready", timeout=REPLY_LIMIT) as reply:
            return bool(reply.status == 200)

    def _get(self, path: str, **parameters: str) -> Any:
        try:
            with urllib.request.urlopen(
                f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=REPLY_LIMIT
            ) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as e:
            raise ClusterError(f"{path} {parameters}: {e.read().decode(errors='replace')}") from e
